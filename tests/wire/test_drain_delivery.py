# SPDX-License-Identifier: Apache-2.0
"""Messages that an engine sends before it closes are received, even if the close is noticed first."""

from __future__ import annotations

import asyncio

import numpy as np
import zmq
import zmq.asyncio

from mizzen.core.request import FinishReason
from mizzen.wire.client.engine_client import EngineLink
from mizzen.wire.codec import encode, engine_decoder
from mizzen.wire.messages import PROTOCOL, Finish, Generate, Outputs, Sampling, Stats, Welcome

TOKENS = 40


def serve(port_ready: asyncio.Future[str], loop: asyncio.AbstractEventLoop) -> None:
    """Run a fake engine that answers one request at once, with one frame per token, and then closes.

    Args:
        port_ready: receives the engine's endpoint.
        loop: event loop of `port_ready`.
    """
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind_to_random_port("tcp://127.0.0.1")
    loop.call_soon_threadsafe(port_ready.set_result, socket.last_endpoint.decode())
    decode = engine_decoder()
    try:
        while True:
            peer, frame = socket.recv_multipart()
            message = decode(frame)
            if not isinstance(message, Generate):
                welcome = Welcome(PROTOCOL, "e", "i", "r", "m", "h", {}, 100, 100, (), 1, 1, False)
                socket.send_multipart([peer, encode(welcome)])
                continue
            socket.send_multipart([peer, encode(Stats(1, 0, 0, 1, 1, 0, True, 1))])
            for index in range(TOKENS):
                last = (
                    (Finish(message.rid, FinishReason.LENGTH, 1, 0, TOKENS),) if index == TOKENS - 1 else ()
                )
                column = np.array([message.rid], "<u4").tobytes(), np.array([index], "<u4").tobytes()
                outputs = Outputs(index, *column, np.array([index], "<i4").tobytes(), b"", last)
                socket.send_multipart([peer, encode(outputs)])
            return
    finally:
        socket.close(linger=2000)
        context.term()


async def test_the_last_tokens_of_a_draining_engine_arrive() -> None:
    context = zmq.asyncio.Context()
    try:
        for _ in range(10):
            loop = asyncio.get_running_loop()
            endpoint: asyncio.Future[str] = loop.create_future()
            engine = loop.run_in_executor(None, serve, endpoint, loop)
            connected = asyncio.Event()
            link = EngineLink(await endpoint, gateway="g", context=context, on_change=connected.set)
            running = asyncio.create_task(link.run())
            async with asyncio.timeout(60):
                while link.welcome is None:
                    await connected.wait()
                    connected.clear()
                stream = link.generate(np.arange(3, dtype="<i4").tobytes(), Sampling())
                received: list[int] = []
                finish = None
                while finish is None:
                    tokens, finish = await stream.next()
                    received += tokens
            assert received == list(range(TOKENS))
            running.cancel()
            await asyncio.gather(running, engine, return_exceptions=True)
    finally:
        context.destroy(linger=0)
