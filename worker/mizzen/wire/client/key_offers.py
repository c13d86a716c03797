"""What a gateway may try with an engine while keys are rotated: ports and keys, the newest first."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.wire.curve_keys import KeyRing, WireKeys, key_pair_name
from mizzen.wire.endpoint import generation_endpoint


@dataclass(frozen=True, slots=True)
class KeyOffer:
    """One way to connect to an engine."""

    endpoint: str
    keys: WireKeys | None = None

    @property
    def name(self) -> str:
        """What its keys are called where they must not be told; empty without keys."""
        return key_pair_name(self.keys.peer, self.keys.public) if self.keys else ""


def key_offers(endpoint: str, ring: KeyRing | None) -> tuple[KeyOffer, ...]:
    """Return the ways to connect to an engine, the newest keys of both sides first.

    Raises:
        ValueError: the endpoint is malformed, or its port has no next one.
    """
    if ring is None:
        return (KeyOffer(endpoint),)
    return tuple(
        KeyOffer(generation_endpoint(endpoint, ring.generation + index), WireKeys(pair.public, pair.secret, peer))
        for index, peer in reversed(tuple(enumerate(ring.peers)))
        for pair in reversed(ring.own)
    )


def offer_names(ring: KeyRing | None) -> list[str]:
    """Return the names of all keys with which connections may be made."""
    return sorted(offer.name for offer in key_offers("inproc://any", ring)) if ring else []
