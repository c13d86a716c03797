"""Plans from rank 0 to ranks of other pods, over TCP: the other form of the plan channel.

Rank 0 listens; every other rank connects (`mizzen.wire.ranks.group_socket`), says who it is, and from then on gets
numbered frames. ZMQ drops what a peer does not take and joins again after a lost connection: the numbers
tell, and the channel then is broken rather than short.
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
"""Frames that wait for a rank at most."""
NUMBER = 8
"""Bytes of a frame's number."""
RETRY_MILLISECONDS = 1


class PlanChannelBroken(RuntimeError):
    """Plans were lost on the way, or a rank is gone."""


def name_of(rank: int) -> bytes:
    """Return how a rank calls itself."""
    return b"rank%d" % rank


class PlanServer(GroupListener):
    """Rank 0's end."""

    def __init__(
        self,
        endpoint: str,
        keys: KeyPair | None,
        ranks: Sequence[int],
        timeout_seconds: float = 10.0,
    ) -> None:
        """Listen for some ranks.

        Raises:
            UnsafeEndpoint: reachable from other machines, and no keys.
            ValueError: the endpoint is malformed, or cannot be bound.
        """
        options = {zmq.ROUTER_MANDATORY: 1, zmq.SNDHWM: FRAMES, zmq.MAXMSGSIZE: 1024}
        super().__init__(endpoint, keys, linger_seconds=timeout_seconds, options=options)
        self._timeout = timeout_seconds
        self._names = [name_of(rank) for rank in ranks]
        self._number = 0

    def wait(self, seconds: float) -> None:
        """Wait until every rank is here.

        Raises:
            PlanChannelStalled: one did not come in time.
        """
        missing, deadline = set(self._names), time.monotonic() + seconds
        while missing:
            left = deadline - time.monotonic()
            if left <= 0 or not self._socket.poll(max(1, int(left * 1000))):
                names = ", ".join(sorted(name.decode() for name in missing))
                raise PlanChannelStalled(f"{names} did not come within {seconds:g} s")
            name, word = self._socket.recv_multipart()[:2]
            if word == HERE:
                missing.discard(name)

    def send(self, plan: StepPlan) -> None:
        """Hand a plan to all other ranks.

        Raises:
            PlanChannelStalled: one does not take its frames.
            PlanChannelBroken: one is gone, or has come again.
        """
        self._send(encode_plan(plan))

    def end(self) -> None:
        """Tell them that nothing more comes; one that is gone is not waited for."""
        try:
            self._send(b"")
        except (PlanChannelStalled, PlanChannelBroken):
            pass

    def _send(self, content: bytes) -> None:
        if self._socket.poll(0):
            name = self._socket.recv_multipart()[0]
            raise PlanChannelBroken(f"{name.decode(errors='replace')} has lost its connection and come again")
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
                    who = name.decode()
                    raise PlanChannelStalled(f"{who} has taken no plan for {self._timeout:g} s") from None
                self._socket.poll(RETRY_MILLISECONDS)
            except zmq.ZMQError as error:
                raise PlanChannelBroken(f"{name.decode()} is gone: {error.strerror}") from None


class PlanClient(GroupMember):
    """Another rank's end."""

    def __init__(self, endpoint: str, keys: KeyPair | None, rank: int) -> None:
        """Connect to rank 0, which may not listen yet.

        Raises:
            UnsafeEndpoint: on another machine, and no keys.
            ValueError: the endpoint is malformed.
        """
        options = {zmq.RCVHWM: FRAMES}
        super().__init__(endpoint, keys, name_of(rank), linger_seconds=0, options=options)
        self._socket.send(HERE)
        self._number = 0
        self.ended = False
        """Nothing more comes."""

    def receive(self, seconds: float) -> StepPlan | None:
        """Return the next plan; None when none came within so many seconds, or the end did.

        Raises:
            PlanChannelBroken: plans were lost.
            MalformedPlan: what came is no plan.
        """
        if self.ended or not self._socket.poll(max(0, int(seconds * 1000))):
            return None
        frame = self._socket.recv()
        self._number += 1
        number = int.from_bytes(frame[:NUMBER], "little")
        if number != self._number:
            raise PlanChannelBroken(f"plan {number} came where {self._number} was due")
        if len(frame) == NUMBER:
            self.ended = True
            return None
        return decode_plan(frame[NUMBER:])
