"""The gateways that an engine knows, and what it counts about them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from mizzen.wire.messages import FetchFile, RefusalCode


@dataclass(slots=True)
class Peer:
    """One gateway's connection, from its Hello until it is forgotten."""

    identity: bytes
    index: int
    """Owner number in the request table, from 1."""
    name: str
    handles: dict[int, int] = field(default_factory=dict)
    """The gateway's handle to the engine's request id, of live requests."""
    unstarted: int = 0
    """Its live requests without a first token."""
    sequence: int = 0
    """Of its next Blocks frame."""
    file_requests: deque[FetchFile] = field(default_factory=deque)
    """Parts of files that it asked for and that have not been sent."""

    def next_sequence(self) -> int:
        """Return the number of the next Blocks frame."""
        self.sequence += 1
        return self.sequence - 1


class Peers:
    """Peers by ZMQ identity and by index. Indexes are reused, so owners stay small."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_identity: dict[bytes, Peer] = {}
        self._by_index: list[Peer | None] = [None]

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(self._by_identity.values()))

    def get(self, identity: bytes) -> Peer | None:
        """Return the peer that said Hello on a connection."""
        return self._by_identity.get(identity)

    def at(self, index: int) -> Peer | None:
        """Return the peer of an owner number."""
        return self._by_index[index]

    def add(self, identity: bytes, name: str) -> Peer | None:
        """Return a new peer, or None when there are as many as allowed."""
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
        """Forget a peer."""
        del self._by_identity[peer.identity]
        self._by_index[peer.index] = None


class ProtocolMismatchLog:
    """Gateways of another protocol that were told of: each tries again for ever, and is news once."""

    def __init__(self, limit: int) -> None:
        self._known: dict[tuple[str, int], None] = {}
        self._limit = limit

    def new(self, name: str, protocol: int) -> bool:
        """Remember one, in the place of the oldest where there are too many; whether it was not known."""
        if (name, protocol) in self._known:
            return False
        if len(self._known) >= self._limit:
            del self._known[next(iter(self._known))]
        self._known[name, protocol] = None
        return True


@dataclass(slots=True)
class WireCounters:
    """What the wire saw since the start, for metrics."""

    accepted: int = 0
    malformed: int = 0
    other_protocol: int = 0
    """Hellos of gateways that speak another protocol."""
    lost_peers: int = 0
    """Forgotten because they were gone or did not take their frames."""
    refused: dict[int, int] = field(default_factory=lambda: dict.fromkeys(map(int, RefusalCode), 0))
    """By RefusalCode."""
