"""Messages between the supervisors of a group's nodes, over TCP.

Node 0 listens, the others connect (`mizzen.wire.ranks.group_socket`). Each side reports its state several
times a second; a silent node is considered lost. Each process has a random `life`, so that a restarted
process is not mistaken for its predecessor.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import zmq

from mizzen.wire.curve_keys import KeyPair
from mizzen.wire.ranks.group_socket import GroupListener, GroupMember

PROTOCOL = 1
FRAME_BYTES = 64 << 10
FRAMES = 256
UNSENT = 4
"""Maximum number of frames queued while node 0 is absent; older ones would be stale."""
LINGER_SECONDS = 1.0


class Join(msgspec.Struct, frozen=True, tag=True):
    """A node's request to join the group."""

    protocol: int
    life: str
    node: int
    settings: dict[str, str]
    """Settings that must be equal on all nodes."""


class RankReport(msgspec.Struct, frozen=True):
    """Progress of a rank."""

    phase: int
    """Number of a `mizzen.server.metric_catalogue.Phase`."""
    text: str
    idle: float
    """Seconds since the rank last made progress; negative while it is not watched."""
    launched: int
    done: int
    process: int


class NodeReport(msgspec.Struct, frozen=True, tag="Report"):
    """State of a node."""

    life: str
    ranks: list[RankReport]
    asked: bool
    """Whether the node was asked to exit and waits for node 0 to drain."""
    kind: str
    """Kind of the node's failure; empty while it runs."""
    reason: str


class GroupState(msgspec.Struct, frozen=True, tag="Word"):
    """State of the group, as node 0 reports it."""

    group: str
    """The `life` of node 0, which identifies the group."""
    state: str
    """`wait` (for other nodes), `run`, `done` (drained and exited) or `failed`."""
    reason: str
    key: str = ""
    """Public key of the group's connections; empty without keys."""


class NodeRefused(msgspec.Struct, frozen=True, tag="Refused"):
    """Node 0's rejection of a node."""

    code: int
    """Exit code that the node should use."""
    reason: str


ToLeader = Join | NodeReport
ToNode = GroupState | NodeRefused
_encoder = msgspec.msgpack.Encoder()
_to_leader = msgspec.msgpack.Decoder(ToLeader)
_to_node = msgspec.msgpack.Decoder(ToNode)


class NodeServer(GroupListener):
    """Node 0's end of the connections. No method blocks."""

    def __init__(self, endpoint: str, keys: KeyPair | None) -> None:
        """Listen.

        Raises:
            UnsafeEndpoint: reachable from other machines, and no keys.
            ValueError: the endpoint is malformed, or cannot be bound.
        """
        options = {zmq.SNDHWM: FRAMES, zmq.RCVHWM: FRAMES, zmq.MAXMSGSIZE: FRAME_BYTES}
        super().__init__(endpoint, keys, linger_seconds=LINGER_SECONDS, options=options)

    def receive(self) -> Iterator[tuple[bytes, ToLeader]]:
        """Yield received messages with the name of their connection; frames that are not messages are
        dropped."""
        for _ in range(FRAMES):
            if not self._socket.poll(0):
                return
            frames = self._socket.recv_multipart()
            try:
                yield frames[0], _to_leader.decode(frames[-1])
            except msgspec.MsgspecError:
                continue

    def send(self, name: bytes, message: ToNode) -> None:
        """Send a message to a node; it is dropped if the node is gone."""
        try:
            self._socket.send_multipart((name, _encoder.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError:
            pass


class NodeClient(GroupMember):
    """The end of a node other than node 0. No method blocks."""

    def __init__(self, endpoint: str, keys: KeyPair | None, name: str) -> None:
        """Connect to node 0, which may not listen, and whose name may not resolve, yet.

        Raises:
            UnsafeEndpoint: on another machine, and no keys.
            ValueError: the endpoint is malformed.
        """
        options = {
            zmq.SNDHWM: UNSENT,
            zmq.RCVHWM: FRAMES,
            zmq.MAXMSGSIZE: FRAME_BYTES,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 1000,
        }
        super().__init__(endpoint, keys, name.encode(), linger_seconds=LINGER_SECONDS, options=options)

    def receive(self) -> Iterator[ToNode]:
        """Yield received messages; frames that are not messages are dropped."""
        for _ in range(FRAMES):
            if not self._socket.poll(0):
                return
            try:
                yield _to_node.decode(self._socket.recv())
            except msgspec.MsgspecError:
                continue

    def send(self, message: ToLeader) -> None:
        """Send a message to node 0; it is dropped if node 0 is absent."""
        try:
            self._socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            pass
