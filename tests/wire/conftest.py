# SPDX-License-Identifier: Apache-2.0
"""An engine's server and its gateways, connected by real sockets and driven by the tests."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import zmq

from mizzen.core.outputs import StepOutput
from mizzen.core.request import Finished, FinishReason, Request
from mizzen.wire.codec import encode, gateway_decoder
from mizzen.wire.curve_keys import WireKeys
from mizzen.wire.endpoint import enable_heartbeats, secure_client
from mizzen.wire.limits import WireLimits
from mizzen.wire.messages import PROTOCOL, Abort, Generate, Hello, Sampling, Welcome, WireMessage
from mizzen.wire.server.engine_server import Arrivals, WireServer
from mizzen.wire.server.image_transfers import ReceivedImage

sys.path.insert(0, str(Path(__file__).parent))  # helper modules of this folder
M = TypeVar("M", bound=WireMessage)
VOCAB = 1000
CONTEXT = 128


class Gateway:
    """A gateway's DEALER socket; `inbox` contains received messages until `take` removes them."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: WireKeys | None = None
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        if keys:
            secure_client(self.socket, keys)
        enable_heartbeats(self.socket, 1, 5)
        self.socket.connect(endpoint)
        self._decode = gateway_decoder()
        self.inbox: list[WireMessage] = []

    def send(self, message: WireMessage | bytes) -> None:
        self.socket.send(message if isinstance(message, bytes) else encode(message))

    def hello(self, name: str = "g") -> None:
        self.send(Hello(PROTOCOL, name))

    def generate(self, rid: int, prompt: list[int] | None = None, **fields: Any) -> None:
        sampling = fields.pop("sampling", Sampling())
        packed = np.array([1, 2, 3] if prompt is None else prompt, dtype="<i4").tobytes()
        self.send(Generate(rid, packed, sampling, **fields))

    def abort(self, rid: int) -> None:
        self.send(Abort(rid))

    def read(self, seconds: float) -> bool:
        if not self.socket.poll(int(seconds * 1000)):
            return False
        self.inbox.append(self._decode(self.socket.recv()))
        return True

    def drain(self) -> None:
        while self.read(0):
            pass

    def take(self, kind: type[M]) -> M | None:
        """Remove the first message of a type from the inbox and return it; None if none has arrived."""
        self.drain()
        for index, message in enumerate(self.inbox):
            if isinstance(message, kind):
                del self.inbox[index]
                return message
        return None


class WireBench:
    """A WireServer with a simulated clock, the requests and aborts that it received, and its gateways."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], server: WireServer) -> None:
        self.context = context
        self.server = server
        self.now = 100.0
        self.waiting = 0
        self.requests: dict[int, Request] = {}
        self.aborts: list[int] = []
        self.images: list[ReceivedImage] = []

    def gateway(self, keys: WireKeys | None = None, hello: bool = True) -> Gateway:
        gateway = Gateway(self.context, self.server.endpoint, keys)
        if hello:
            gateway.hello()
            self.expect(gateway, Welcome)
        return gateway

    def pump(self) -> Arrivals:
        """Let the server read the messages that have arrived; record the requests and aborts."""
        self.server.wait(0.01)
        arrivals = self.server.receive(self.now, self.waiting)
        self.requests |= {request.rid: request for request in arrivals.requests}
        self.aborts += arrivals.aborts
        self.images += arrivals.images
        return arrivals

    def expect(self, gateway: Gateway, kind: type[M], seconds: float = 60.0) -> M:
        """Pump until the gateway has received a message of a type; return that message."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.pump()
            message = gateway.take(kind)
            if message is not None:
                return message
        raise AssertionError(f"no {kind.__name__}; there are {gateway.inbox}")

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Pump until a condition holds; fail after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            self.pump()

    def submit(self, gateway: Gateway, rid: int, **fields: Any) -> int:
        """Send a request with the gateway's handle `rid`; return the id that the engine gives it."""
        known_rids = set(self.requests)
        gateway.generate(rid, **fields)
        self.until(lambda: len(self.requests) > len(known_rids))
        (engine_rid,) = set(self.requests) - known_rids
        return engine_rid

    def step(
        self,
        number: int,
        rows: list[tuple[int, int, list[int]]],
        finished: tuple[Finished, ...] = (),
        counts: bool = False,
    ) -> Any:
        """Send the outputs of a step to the gateways, and forget the finished requests.

        Args:
            number: number of the step.
            rows: (the engine's request id, offset of the first token, tokens) for each request.
            finished: the requests that end in this step.
            counts: whether the output states the number of tokens of each row; if not, rows have one token.

        Returns:
            Seconds from arrival to the first token, for each request that got its first token in this step.
        """
        sizes = np.array([len(tokens) for _, _, tokens in rows], dtype=np.int32)
        output = StepOutput(
            step=number,
            rids=np.array([rid for rid, _, _ in rows], dtype=np.int64),
            offsets=np.array([offset for _, offset, _ in rows], dtype=np.int32),
            tokens=np.array([token for _, _, tokens in rows for token in tokens], dtype=np.int32),
            counts=sizes if counts else None,
            finished=finished,
        )
        waits = self.server.out.send(output, self.now)
        for end in finished:
            self.requests.pop(end.rid, None)
        return waits

    def end(self, rid: int, reason: FinishReason = FinishReason.STOP) -> Finished:
        return Finished(rid=rid, reason=reason, prompt_tokens=3, cached_tokens=1, output_tokens=2)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    new_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield new_context
    new_context.destroy(linger=0)


@pytest.fixture
def make_bench(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Callable[..., WireBench]]:
    servers: list[WireServer] = []

    def make(
        endpoint: str = "tcp://127.0.0.1:*",
        keys: WireKeys | None = None,
        files: dict[str, bytes] | None = None,
        max_waiting: int = 100,
        images: Any = None,
        **limits: Any,
    ) -> WireBench:
        files = files or {}
        welcome = Welcome(
            PROTOCOL,
            "engine-0",
            "cafe",
            "r1",
            "model",
            "hash",
            {name: len(content) for name, content in files.items()},
            CONTEXT,
            VOCAB,
            (2,),
            16,
            8,
            False,
            images=images is not None,
        )
        limits = {"linger_seconds": 0.1} | limits
        server = WireServer(
            endpoint,
            keys,
            welcome,
            files,
            max_waiting=max_waiting,
            limits=WireLimits(**limits),
            images=images,
        )
        servers.append(server)
        return WireBench(context, server)

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def bench(make_bench: Callable[..., WireBench]) -> WireBench:
    return make_bench()
