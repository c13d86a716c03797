# SPDX-License-Identifier: Apache-2.0
"""The gateways that are connected to an engine (its peers), and counters of the wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from mizzen.wire.messages import PROTOCOL, FetchFile, RefusalCode

TRANSFER_REJECTIONS = ("reference", "parts", "digest", "late")
"""Reasons why an image is not accepted: its reference is invalid, its parts do not form the file, the file
does not have the digest, or no part arrived in time."""


@dataclass(slots=True)
class Peer:
    """A gateway's connection, from its `Hello` until it is dropped or sends another `Hello`."""

    identity: bytes
    index: int
    """Number by which the request table identifies the peer as owner of requests; at least 1."""
    name: str
    protocol: int = PROTOCOL
    """Version of the protocol that the connection uses."""
    handles: dict[int, int] = field(default_factory=dict)
    """Live requests: the engine's request ids by the gateway's handles."""
    unstarted: int = 0
    """Number of live requests without a first token."""
    sequence: int = 0
    """`Blocks.sequence` of the next `Blocks` message."""
    file_requests: deque[FetchFile] = field(default_factory=deque)
    """Pending requests for file parts."""

    def next_sequence(self) -> int:
        """Return `sequence` and increment it."""
        self.sequence += 1
        return self.sequence - 1


class Peers:
    """The connected peers, by ZMQ identity and by index; indices are reused, so that they stay small."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_identity: dict[bytes, Peer] = {}
        self._by_index: list[Peer | None] = [None]

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(self._by_identity.values()))

    def get(self, identity: bytes) -> Peer | None:
        """Return the peer of a connection, or None if the connection has sent no `Hello` or was dropped."""
        return self._by_identity.get(identity)

    def at(self, index: int) -> Peer | None:
        """Return the peer with an index, or None if that peer is gone."""
        return self._by_index[index]

    def add(self, identity: bytes, name: str) -> Peer | None:
        """Add and return a peer, or return None if the maximum number of peers is connected."""
        if len(self._by_identity) >= self._limit:
            return None
        try:
            index = self._by_index.index(None, 1)
        except ValueError:
            index = len(self._by_index)
            self._by_index.append(None)
        peer = Peer(identity, index, name)
        self._by_identity[identity] = self._by_index[index] = peer
        return peer

    def remove(self, peer: Peer) -> None:
        """Remove a peer and free its index."""
        del self._by_identity[peer.identity]
        self._by_index[peer.index] = None


class ProtocolMismatchLog:
    """Record of rejected gateways that speak another protocol: they retry for ever, but are logged once."""

    def __init__(self, limit: int) -> None:
        self._known: dict[tuple[str, int], None] = {}
        self._limit = limit

    def new(self, name: str, protocol: int) -> bool:
        """Record a gateway; return False if it was already recorded. If the record is full, forget the oldest
        gateway."""
        if (name, protocol) in self._known:
            return False
        if len(self._known) >= self._limit:
            del self._known[next(iter(self._known))]
        self._known[name, protocol] = None
        return True


@dataclass(slots=True)
class WireCounters:
    """Counters of the wire since the engine started, for metrics."""

    accepted: int = 0
    malformed: int = 0
    other_protocol: int = 0
    """Number of `Hello` messages from gateways that speak another protocol."""
    lost_peers: int = 0
    """Number of peers dropped because they were gone or did not accept their frames."""
    images_requested: int = 0
    """Number of images whose bytes were requested from gateways."""
    images_received: int = 0
    """Number of images that arrived completely."""
    image_bytes: int = 0
    """Number of bytes of images that arrived."""
    images_rejected: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TRANSFER_REJECTIONS, 0))
    """Number of images that were not accepted, by reason."""
    refused: dict[int, int] = field(default_factory=lambda: dict.fromkeys(map(int, RefusalCode), 0))
    """Number of rejections, by `RefusalCode`."""
