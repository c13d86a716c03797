"""The gateways connected to an engine, and counters of the wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from mizzen.wire.messages import FetchFile, RefusalCode


@dataclass(slots=True)
class Peer:
    """One gateway's connection, from its Hello until it is dropped."""

    identity: bytes
    index: int
    """Owner number in the request table; counts from 1."""
    name: str
    handles: dict[int, int] = field(default_factory=dict)
    """Request ids of the engine, by the gateway's handle, of live requests."""
    unstarted: int = 0
    """Number of live requests without a first token."""
    sequence: int = 0
    """Number of the next `Blocks` frame."""
    file_requests: deque[FetchFile] = field(default_factory=deque)
    """Requested file parts that have not been sent."""

    def next_sequence(self) -> int:
        """Return the number of the next `Blocks` frame and advance it."""
        self.sequence += 1
        return self.sequence - 1


class Peers:
    """Peers by ZMQ identity and by index. Indexes are reused, so owner numbers stay small."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_identity: dict[bytes, Peer] = {}
        self._by_index: list[Peer | None] = [None]

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(self._by_identity.values()))

    def get(self, identity: bytes) -> Peer | None:
        """Return the peer of a connection, or None before its Hello."""
        return self._by_identity.get(identity)

    def at(self, index: int) -> Peer | None:
        """Return the peer with an owner number, or None."""
        return self._by_index[index]

    def add(self, identity: bytes, name: str) -> Peer | None:
        """Add and return a peer, or return None if the limit is reached."""
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
        """Remove a peer."""
        del self._by_identity[peer.identity]
        self._by_index[peer.index] = None


class ProtocolMismatchLog:
    """Gateways with another protocol that were logged: each retries for ever and is logged once."""

    def __init__(self, limit: int) -> None:
        self._known: dict[tuple[str, int], None] = {}
        self._limit = limit

    def new(self, name: str, protocol: int) -> bool:
        """Record a gateway, dropping the oldest beyond the limit; return whether it is new."""
        if (name, protocol) in self._known:
            return False
        if len(self._known) >= self._limit:
            del self._known[next(iter(self._known))]
        self._known[name, protocol] = None
        return True


@dataclass(slots=True)
class WireCounters:
    """Counters of the wire since the start, for metrics."""

    accepted: int = 0
    malformed: int = 0
    other_protocol: int = 0
    """Number of Hellos of gateways with another protocol."""
    lost_peers: int = 0
    """Number of peers dropped because they were gone or did not accept their frames."""
    refused: dict[int, int] = field(default_factory=lambda: dict.fromkeys(map(int, RefusalCode), 0))
    """Number of rejections by RefusalCode."""
