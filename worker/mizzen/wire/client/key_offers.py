"""What a gateway may try with an engine while keys are rotated: ports and keys, the newest first."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.wire.curve_keys import KeyRing, WireKeys, name_of
from mizzen.wire.endpoint import door


@dataclass(frozen=True, slots=True)
class Offer:
    """One way to connect to an engine."""

    endpoint: str
    keys: WireKeys | None = None

    @property
    def name(self) -> str:
        """What its keys are called where they must not be told; empty without keys."""
        return name_of(self.keys.peer, self.keys.public) if self.keys else ""


def offers(endpoint: str, ring: KeyRing | None) -> tuple[Offer, ...]:
    """Return the ways to connect to an engine, the newest keys of both sides first.

    Raises:
        ValueError: the endpoint is malformed, or its port has no next one.
    """
    if ring is None:
        return (Offer(endpoint),)
    return tuple(
        Offer(door(endpoint, ring.generation + index), WireKeys(pair.public, pair.secret, peer))
        for index, peer in reversed(tuple(enumerate(ring.peers)))
        for pair in reversed(ring.own)
    )


def names(ring: KeyRing | None) -> list[str]:
    """Return the names of all keys with which connections may be made."""
    return sorted(offer.name for offer in offers("inproc://any", ring)) if ring else []
