# SPDX-License-Identifier: Apache-2.0
"""The plan channel between pods: numbered frames over TCP from rank 0 to the other ranks.

Rank 0 listens; every rank of another pod connects (`mizzen.wire.ranks.group_socket`), sends its name, and
receives numbered frames. ZMQ may silently lose frames when a queue is full or when it reconnects after a lost
connection. A gap in the numbers reveals such a loss and breaks the channel, so that no rank skips a plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq

from mizzen.core.step_plan import StepPlan
from mizzen.wire.curve_keys import KeyPair
from mizzen.wire.ranks.group_socket import GroupListener, GroupMember
from mizzen.wire.ranks.plan_encoding import decode_plan, encode_plan
from mizzen.wire.ranks.plan_ring import PlanChannelStalled

HERE = b"here"
FRAMES = 64
"""Maximum number of frames that ZMQ queues for a rank."""
NUMBER = 8
"""Size in bytes of a frame's number."""
RETRY_MILLISECONDS = 1


class PlanChannelBroken(RuntimeError):
    """Plans were lost in transit, or a rank is gone."""


def rank_identity(rank: int) -> bytes:
    """Return the ZMQ identity with which a rank connects."""
    return b"rank%d" % rank


class PlanServer(GroupListener):
    """Rank 0's end of the plan channel between pods."""

    def __init__(
        self,
        endpoint: str,
        keys: KeyPair | None,
        ranks: Sequence[int],
        timeout_seconds: float = 10.0,
    ) -> None:
        """Listen for the given ranks; `send` waits at most `timeout_seconds` for a rank with a full queue.

        Raises:
            UnsafeEndpoint: `keys` is missing, but other machines can reach the endpoint.
            ValueError: the endpoint is malformed or cannot be bound.
        """
        options = {zmq.ROUTER_MANDATORY: 1, zmq.SNDHWM: FRAMES, zmq.MAXMSGSIZE: 1024}
        super().__init__(endpoint, keys, linger_seconds=timeout_seconds, options=options)
        self._timeout = timeout_seconds
        self._names = [rank_identity(rank) for rank in ranks]
        self._number = 0

    def wait(self, seconds: float) -> None:
        """Wait until every rank has connected.

        Raises:
            PlanChannelStalled: a rank did not connect within `seconds`.
        """
        missing, deadline = set(self._names), time.monotonic() + seconds
        while missing:
            left = deadline - time.monotonic()
            if left <= 0 or not self._socket.poll(max(1, int(left * 1000))):
                names = ", ".join(sorted(name.decode() for name in missing))
                raise PlanChannelStalled(f"{names} did not connect within {seconds:g} s")
            name, word = self._socket.recv_multipart()[:2]
            if word == HERE:
                missing.discard(name)

    def send(self, plan: StepPlan) -> None:
        """Send a plan to all other ranks.

        Raises:
            PlanChannelStalled: a rank's queue stayed full for `timeout_seconds`.
            PlanChannelBroken: a rank is gone, or has lost its connection and reconnected.
        """
        self._send(encode_plan(plan))

    def end(self) -> None:
        """Send the frame that ends the stream; give up if a rank is gone or does not read."""
        try:
            self._send(b"")
        except (PlanChannelStalled, PlanChannelBroken):
            pass

    def _send(self, content: bytes) -> None:
        if self._socket.poll(0):
            name = self._socket.recv_multipart()[0]
            raise PlanChannelBroken(f"{name.decode(errors='replace')} lost its connection and reconnected")
        self._number += 1
        frame = self._number.to_bytes(NUMBER, "little") + content
        deadline = time.monotonic() + self._timeout
        for name in self._names:
            self._send_to(name, frame, deadline)

    def _send_to(self, name: bytes, frame: bytes, deadline: float) -> None:
        while True:
            try:
                self._socket.send_multipart((name, frame), zmq.NOBLOCK)
                return
            except zmq.Again:
                if time.monotonic() > deadline:
                    text = f"{name.decode()} has read no plan for {self._timeout:g} s"
                    raise PlanChannelStalled(text) from None
                self._socket.poll(RETRY_MILLISECONDS)
            except zmq.ZMQError as error:
                raise PlanChannelBroken(f"{name.decode()} is gone: {error.strerror}") from None


class PlanClient(GroupMember):
    """The receiving end of the plan channel, in a rank whose pod does not contain rank 0."""

    def __init__(self, endpoint: str, keys: KeyPair | None, rank: int) -> None:
        """Connect to rank 0, which may start to listen later.

        Raises:
            UnsafeEndpoint: `keys` is missing, but the endpoint is on another machine.
            ValueError: the endpoint is malformed.
        """
        options = {zmq.RCVHWM: FRAMES}
        super().__init__(endpoint, keys, rank_identity(rank), linger_seconds=0, options=options)
        self._socket.send(HERE)
        self._number = 0
        self.ended = False
        """Whether the frame that ends the stream was received."""

    def receive(self, seconds: float) -> StepPlan | None:
        """Return the next plan, or None if none arrived within `seconds` or the stream has ended.

        Raises:
            PlanChannelBroken: the number of the frame shows that earlier plans were lost.
            MalformedPlan: the frame does not contain a valid plan.
        """
        if self.ended or not self._socket.poll(max(0, int(seconds * 1000))):
            return None
        frame = self._socket.recv()
        self._number += 1
        number = int.from_bytes(frame[:NUMBER], "little")
        if number != self._number:
            raise PlanChannelBroken(f"received plan {number}, expected plan {self._number}")
        if len(frame) == NUMBER:
            self.ended = True
            return None
        return decode_plan(frame[NUMBER:])
