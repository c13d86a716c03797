# SPDX-License-Identifier: Apache-2.0
"""Combinations of endpoint and keys that a gateway tries during a key rotation, the newest keys first."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.wire.curve_keys import KeyRing, WireKeys, key_pair_name
from mizzen.wire.endpoint import generation_endpoint


@dataclass(frozen=True, slots=True)
class KeyOffer:
    """A combination of endpoint and keys with which a gateway may connect to an engine."""

    endpoint: str
    keys: WireKeys | None = None

    @property
    def name(self) -> str:
        """Short name of the keys for logs, which must not contain keys; empty if `keys` is not set."""
        return key_pair_name(self.keys.peer, self.keys.public) if self.keys else ""


def key_offers(endpoint: str, ring: KeyRing | None) -> tuple[KeyOffer, ...]:
    """Return the combinations with which to connect to an engine, the newest keys of both sides first.

    Args:
        endpoint: endpoint at which the engine listens with keys of even generations.
        ring: the gateway's keys; None if connections are not encrypted.

    Raises:
        ValueError: an odd key generation needs the next port, but the port is 65535 or not a number.
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
    """Return the sorted names of all key combinations that the gateway's connections may use."""
    return sorted(offer.name for offer in key_offers("inproc://any", ring)) if ring else []
