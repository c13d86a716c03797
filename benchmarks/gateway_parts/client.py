# SPDX-License-Identifier: Apache-2.0
"""HTTP client that runs many streams from one process, and checks every byte of every answer.

During a run, the client only records bytes and their arrival times; it parses and checks them after the run.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import random
import time
from collections import deque
from typing import Any

import numpy as np
from gateway_parts.answer_check import Checker
from gateway_parts.engines import reply_key, reply_start
from gateway_parts.streams import Plan, PreparedRequest, Result, Stream
from gateway_parts.vocabulary import Vocabulary, chat_text

HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    "authorization: Bearer none\r\nuser-agent: gateway-load\r\naccept: */*\r\ncontent-length: {}\r\n\r\n"
)
END = b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """Keep-alive connection to the gateway, with one stream at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stream: Stream | None = None
        self._length: int | None = None

    def connection_made(self, transport: Any) -> None:
        """Store the transport of the new connection."""
        self.transport = transport

    def send(self, request: PreparedRequest) -> None:
        """Send a request; the answer is recorded as a new stream."""
        self._length = None
        self._stream = Stream(request, time.monotonic())
        self.transport.write(request.data)

    def data_received(self, data: bytes) -> None:
        """Record received bytes and their arrival time; end the stream if it is complete."""
        now, stream = time.monotonic(), self._stream
        if stream is None:
            self.transport.close()
            return
        raw = stream.raw
        raw += data
        stream.marks.append((now, len(raw)))
        if len(stream.marks) == 1:
            head, _, _ = bytes(raw).partition(b"\r\n\r\n")
            if b"\r\ncontent-length: " in head:
                size = int(head.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])
                self._length = len(head) + 4 + size
        if (len(raw) >= self._length) if self._length is not None else raw.endswith(END):
            self._end(now)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the open stream, if there is one, with an error."""
        if self._stream is not None:
            self._stream.error = f"the connection was closed: {exc}"
            self._end(time.monotonic())
        self._client.on_connection_lost(self)

    def _end(self, now: float) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.ended = now
            self._client.on_stream_end(self, stream)


class Client:
    """Runs the streams of one plan on one event loop."""

    def __init__(self, plan: Plan, requests: list[PreparedRequest]) -> None:
        self._plan = plan
        self._requests = requests
        self._next = 0
        self._idle: deque[Connection] = deque()
        self._open = 0
        self.max_open = 0
        self._stopped = False
        self.streams: list[Stream] = []
        self._empty = asyncio.Event()

    async def run(self) -> tuple[float, float]:
        """Run all streams of the plan; return the start and end of the measured span (monotonic seconds)."""
        plan = self._plan
        began = time.monotonic() + plan.warm_seconds
        until = began + plan.seconds
        if plan.rate:
            rng = random.Random(plan.seed)
            at = time.monotonic()
            while at < until:
                if (left := at - time.monotonic()) > 0:
                    await asyncio.sleep(left)
                await self._send()
                at += rng.expovariate(plan.rate)
        else:
            gap = min(2.0, plan.warm_seconds) / max(1, plan.concurrency)
            for _ in range(plan.concurrency):
                await self._send()
                await asyncio.sleep(gap)
            await asyncio.sleep(max(0.0, until - time.monotonic()))
        ended = time.monotonic()
        self._stopped = True
        if self._open:
            try:
                async with asyncio.timeout(60):
                    await self._empty.wait()
            except TimeoutError:
                pass
        return began, ended

    async def _send(self) -> None:
        if self._idle:
            connection = self._idle.popleft()
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(
                lambda: Connection(self), "127.0.0.1", self._plan.port
            )
        self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        request = self._requests[self._next % len(self._requests)]
        self._next += 1
        self._open += 1
        self.max_open = max(self.max_open, self._open)
        connection.send(request)

    def on_stream_end(self, connection: Connection, stream: Stream) -> None:
        """Store an answer; if the plan has a `concurrency`, send the next request on this connection."""
        self.streams.append(stream)
        self._open -= 1
        if self._stopped or self._plan.once:
            if not self._open:
                self._empty.set()
        elif not self._plan.rate and not stream.error:
            self._begin(connection)
            return
        if not stream.error:
            self._idle.append(connection)

    def on_connection_lost(self, connection: Connection) -> None:
        """Remove a closed connection."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close all idle connections."""
        for connection in tuple(self._idle):
            connection.transport.close()

    @property
    def open_streams(self) -> int:
        """Number of streams that have not ended."""
        return self._open


def prepare_requests(vocabulary: Vocabulary, plan: Plan, replies: int) -> list[PreparedRequest]:
    """Return `plan.prompts` requests with different prompts; `replies` is the length of the reply list."""
    rng = random.Random(1000 + plan.seed)
    stride = 7 if plan.prompts > 100 else plan.prompt_tokens // 7
    wanted = plan.prompt_tokens + stride * plan.prompts
    stock = vocabulary.encode(vocabulary.language.text(rng, wanted))
    requests = []
    for number in range(plan.prompts):
        start = number * stride
        content = vocabulary.tokenizer.decode(stock[start : start + plan.prompt_tokens])
        ids = np.array(vocabulary.encode(chat_text(content)), np.int32)
        body = json.dumps(
            {
                "model": "bench",
                "messages": [{"role": "user", "content": content}],
                "max_tokens": plan.output_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        key = reply_key(ids)
        data = HEAD.format(len(body)).encode() + body
        requests.append(PreparedRequest(data, key, reply_start(key, replies), len(ids)))
    return requests


async def _drive(client: Client) -> tuple[float, float]:
    try:
        return await client.run()
    finally:
        client.close()


def drive(plan: Plan, cores: set[int], pipe: Any) -> None:
    """Run a plan in this process on the CPU cores `cores`.

    The run starts when a message arrives through the pipe, and the result is sent through the same pipe.
    """
    import uvloop

    os.sched_setaffinity(0, cores)
    vocabulary = Vocabulary()
    replies = vocabulary.replies()
    requests = prepare_requests(vocabulary, plan, len(replies))
    checker = Checker(vocabulary, replies, plan)
    pipe.send("ready")
    pipe.recv()
    gc.collect()
    gc.freeze()
    gc.disable()
    client: Client | None = None

    async def run() -> tuple[float, float]:
        nonlocal client
        client = Client(plan, requests)
        return await _drive(client)

    result = Result(*uvloop.run(run()))
    if client is None:
        raise RuntimeError("the client did not run")
    if client.open_streams:
        result.failed += client.open_streams
        result.failures.append(f"{client.open_streams} streams did not end")
    result.max_open = client.max_open
    for stream in client.streams:
        count_stream(result, checker, stream)
    pipe.send(result)


def count_stream(result: Result, checker: Checker, stream: Stream) -> None:
    """Check the answer of one stream, and count the stream in `result`."""
    try:
        event_times, arrivals = checker.check(stream)
    except Exception as error:  # any error while checking means that the answer is incorrect
        result.failed += 1
        if len(result.failures) < 5:
            result.failures.append(f"{type(error).__name__}: {error}"[:400])
        return
    result.good += 1
    result.requests += result.began <= stream.ended <= result.ended
    result.chunks += sum(result.began <= at <= result.ended for at in event_times)
    if arrivals is not None and stream.sent >= result.began:
        result.arrivals.append(arrivals)


class ClientProcess:
    """Client in a process of its own, which waits for `start` before it sends requests."""

    def __init__(self, plan: Plan, cores: set[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=drive, args=(plan, cores, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def start(self) -> None:
        """Make the client send requests."""
        self._pipe.send("go")

    def result(self) -> Result:
        """Wait until the client is done, and return its result."""
        result = self._pipe.recv()
        self._process.join(10)
        return result
