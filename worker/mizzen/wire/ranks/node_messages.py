"""What the supervisors of a group's nodes tell each other, over TCP.

Node 0 listens, the others connect (`mizzen.wire.ranks.group_socket`). Each side says several times a second how it
is; who says nothing is gone. A process carries a random name of its `life`, so that one that was started
again is not taken for the one before.
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
"""Frames that wait for a node 0 that is not there: what they say is old by then."""
LINGER_SECONDS = 1.0


class Join(msgspec.Struct, frozen=True, tag=True):
    """A node asks to be part of the group."""

    protocol: int
    life: str
    node: int
    settings: dict[str, str]
    """What must be the same on all nodes."""


class RankReport(msgspec.Struct, frozen=True):
    """How far a rank is."""

    phase: int
    """Of `mizzen.server.metric_catalogue.Phase`."""
    text: str
    idle: float
    """Seconds since it last ran; negative while it is not watched."""
    launched: int
    done: int
    process: int


class Report(msgspec.Struct, frozen=True, tag=True):
    """How a node is."""

    life: str
    ranks: list[RankReport]
    asked: bool
    """It was asked to end, and waits for node 0 to drain."""
    kind: str
    """Of its failure; empty while it runs."""
    reason: str


class Word(msgspec.Struct, frozen=True, tag=True):
    """What node 0 tells."""

    group: str
    """The life of node 0, which names the group."""
    state: str
    """wait: for other nodes; run; done: it has drained and ended; failed."""
    reason: str
    key: str = ""
    """Public key that the group's connections use; empty without keys."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Node 0 turns a node away."""

    code: int
    """What the node should exit with."""
    reason: str


ToLeader = Join | Report
ToNode = Word | Refused
_encoder = msgspec.msgpack.Encoder()
_to_leader = msgspec.msgpack.Decoder(ToLeader)
_to_node = msgspec.msgpack.Decoder(ToNode)


class NodeServer(GroupListener):
    """Node 0's end. Nothing in it waits."""

    def __init__(self, endpoint: str, keys: KeyPair | None) -> None:
        """Listen.

        Raises:
            UnsafeEndpoint: reachable from other machines, and no keys.
            ValueError: the endpoint is malformed, or cannot be bound.
        """
        options = {zmq.SNDHWM: FRAMES, zmq.RCVHWM: FRAMES, zmq.MAXMSGSIZE: FRAME_BYTES}
        super().__init__(endpoint, keys, linger_seconds=LINGER_SECONDS, options=options)

    def receive(self) -> Iterator[tuple[bytes, ToLeader]]:
        """Yield what has come, with the name of its connection; drops what is no message."""
        for _ in range(FRAMES):
            if not self._socket.poll(0):
                return
            frames = self._socket.recv_multipart()
            try:
                yield frames[0], _to_leader.decode(frames[-1])
            except msgspec.MsgspecError:
                continue

    def send(self, name: bytes, message: ToNode) -> None:
        """Tell a node; one that is gone hears nothing."""
        try:
            self._socket.send_multipart((name, _encoder.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError:
            pass


class NodeClient(GroupMember):
    """Another node's end. Nothing in it waits."""

    def __init__(self, endpoint: str, keys: KeyPair | None, name: str) -> None:
        """Connect to node 0, which may not listen, and whose name may not resolve yet.

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
        """Yield what has come; drops what is no message."""
        for _ in range(FRAMES):
            if not self._socket.poll(0):
                return
            try:
                yield _to_node.decode(self._socket.recv())
            except msgspec.MsgspecError:
                continue

    def send(self, message: ToLeader) -> None:
        """Tell node 0, if it is there."""
        try:
            self._socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            pass
