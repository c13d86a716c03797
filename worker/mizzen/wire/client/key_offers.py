"""Combinations of port and keys that a gateway may try during a key rotation, the newest first."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.wire.curve_keys import KeyRing, WireKeys, key_pair_name
from mizzen.wire.endpoint import generation_endpoint


@dataclass(frozen=True, slots=True)
class KeyOffer:
    """One combination of endpoint and keys to connect to an engine with."""

    endpoint: str
    keys: WireKeys | None = None

    @property
    def name(self) -> str:
        """Short name of the keys, for places that must not show them; empty without keys."""
        return key_pair_name(self.keys.peer, self.keys.public) if self.keys else ""


def key_offers(endpoint: str, ring: KeyRing | None) -> tuple[KeyOffer, ...]:
    """Return the combinations to connect to an engine with, the newest keys of both sides first.

    Raises:
        ValueError: the endpoint is malformed, or its port is the last one.
    """
    if ring is None:
        return (KeyOffer(endpoint),)
    return tuple(
        KeyOffer(
            generation_endpoint(endpoint, ring.generation + index), WireKeys(pair.public, pair.secret, peer)
        )
        for index, peer in reversed(tuple(enumerate(ring.peers)))
        for pair in reversed(ring.own)
    )


def offer_names(ring: KeyRing | None) -> list[str]:
    """Return the names of all key pairs that connections may use."""
    return sorted(offer.name for offer in key_offers("inproc://any", ring)) if ring else []
