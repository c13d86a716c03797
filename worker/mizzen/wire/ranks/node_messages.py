# SPDX-License-Identifier: Apache-2.0
"""Messages between the supervisors of a group's nodes, over TCP.

Node 0 listens, and the other nodes connect (`mizzen.wire.ranks.group_socket`). Each side reports its state
several times a second; a silent node is considered lost. Each process has a random id, its `life`, so that a
restarted process is not mistaken for its predecessor.
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
MAX_UNSENT_FRAMES = 4
"""Maximum number of frames that a node queues while node 0 is unreachable; a longer queue would only hold
outdated reports."""
LINGER_SECONDS = 1.0


class Join(msgspec.Struct, frozen=True, tag=True):
    """Request of a node to join the group of node 0."""

    protocol: int
    life: str
    node: int
    settings: dict[str, str]
    """Values of the settings that must be equal on all nodes, by name."""


class RankReport(msgspec.Struct, frozen=True):
    """Progress of a rank, as its node reports it to node 0."""

    phase: int
    """Number of the phase (`mizzen.server.metric_catalogue.Phase`) that the rank is in."""
    text: str
    idle: float
    """Seconds since the rank's process last ran; negative while the rank is not monitored."""
    launched: int
    done: int
    process: int


class NodeReport(msgspec.Struct, frozen=True, tag="Report"):
    """State of a node other than node 0, which it reports to node 0."""

    life: str
    ranks: list[RankReport]
    asked: bool
    """Whether the node has received SIGTERM or SIGINT and waits until node 0 has drained."""
    kind: str
    """Kind of the node's failure (`mizzen.server.exit_reason`); empty while the node runs."""
    reason: str


class GroupState(msgspec.Struct, frozen=True, tag="Word"):
    """State of the group, which node 0 reports to the other nodes."""

    group: str
    """The `life` of node 0, which identifies the group."""
    state: str
    """`wait` (nodes are still missing), `run`, `done` (node 0 has drained and exits) or `failed`."""
    reason: str
    key: str = ""
    """Public CURVE key of the group's connections; empty if no keys are configured."""


class NodeRefused(msgspec.Struct, frozen=True, tag="Refused"):
    """Rejection of a node by node 0."""

    code: int
    """Exit code with which the rejected node must exit."""
    reason: str


ToLeader = Join | NodeReport
ToNode = GroupState | NodeRefused
_encoder = msgspec.msgpack.Encoder()
_to_leader = msgspec.msgpack.Decoder(ToLeader)
_to_node = msgspec.msgpack.Decoder(ToNode)


class NodeServer(GroupListener):
    """Node 0's end of the connections between nodes; `receive` and `send` do not block."""

    def __init__(self, endpoint: str, keys: KeyPair | None) -> None:
        """Listen at the endpoint; `keys` is the key pair of all nodes.

        Raises:
            UnsafeEndpoint: `keys` is missing, but other machines can reach the endpoint.
            ValueError: the endpoint is malformed or cannot be bound.
        """
        options = {zmq.SNDHWM: FRAMES, zmq.RCVHWM: FRAMES, zmq.MAXMSGSIZE: FRAME_BYTES}
        super().__init__(endpoint, keys, linger_seconds=LINGER_SECONDS, options=options)

    def receive(self) -> Iterator[tuple[bytes, ToLeader]]:
        """Yield received messages as (name of the connection, message); drop undecodable frames."""
        for _ in range(FRAMES):
            if not self._socket.poll(0):
                return
            frames = self._socket.recv_multipart()
            try:
                yield frames[0], _to_leader.decode(frames[-1])
            except msgspec.MsgspecError:
                continue

    def send(self, name: bytes, message: ToNode) -> None:
        """Send a message to the node whose connection is called `name`; drop it if the node is gone."""
        try:
            self._socket.send_multipart((name, _encoder.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError:
            pass


class NodeClient(GroupMember):
    """The connection to node 0, in a node other than node 0; `receive` and `send` do not block."""

    def __init__(self, endpoint: str, keys: KeyPair | None, name: str) -> None:
        """Connect as `name` to node 0, which may start later and whose host name may not resolve yet.

        Raises:
            UnsafeEndpoint: `keys` is missing, but the endpoint is on another machine.
            ValueError: the endpoint is malformed.
        """
        options = {
            zmq.SNDHWM: MAX_UNSENT_FRAMES,
            zmq.RCVHWM: FRAMES,
            zmq.MAXMSGSIZE: FRAME_BYTES,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 1000,
        }
        super().__init__(endpoint, keys, name.encode(), linger_seconds=LINGER_SECONDS, options=options)

    def receive(self) -> Iterator[ToNode]:
        """Yield received messages; drop undecodable frames."""
        for _ in range(FRAMES):
            if not self._socket.poll(0):
                return
            try:
                yield _to_node.decode(self._socket.recv())
            except msgspec.MsgspecError:
                continue

    def send(self, message: ToLeader) -> None:
        """Send a message to node 0; drop it if the queue is full because node 0 is unreachable."""
        try:
            self._socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            pass
