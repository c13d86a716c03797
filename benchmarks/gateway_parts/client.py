"""A client that sends many streams from one process and checks every byte of every answer afterwards.

During a run it only records which bytes arrived when; it parses and checks them after the run.
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
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from gateway_parts.engines import reply_key, reply_start
from gateway_parts.vocabulary import Vocabulary, chat_text
from numpy.typing import NDArray

HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    "authorization: Bearer none\r\nuser-agent: gateway-load\r\naccept: */*\r\ncontent-length: {}\r\n\r\n"
)
END = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of a client run; times in seconds."""

    port: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    warm_seconds: float = 0.0
    """Time at the start that is not measured."""
    concurrency: int = 0
    """Number of streams at once, each followed by the next; 0 with `rate`."""
    rate: float = 0.0
    """Streams started per second, at random times (Poisson)."""
    once: bool = False
    """Whether to send each of the `concurrency` streams only once."""
    prompts: int = 4000
    seed: int = 1
    timings: bool = False
    """Whether to return the arrival time of each token."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is ready to send, and the location of its expected answer."""

    data: bytes
    key: int
    start: int
    tokens: int


@dataclass(slots=True)
class Stream:
    """The raw answer to a request."""

    request: PreparedRequest
    sent: float
    raw: bytearray = field(default_factory=bytearray)
    marks: list[tuple[float, int]] = field(default_factory=list)
    """Arrival times, each with the number of bytes received by then."""
    error: str = ""
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival times of the tokens of a request, in seconds of the monotonic clock."""

    key: int
    sent: float
    tokens: NDArray[np.float64]


@dataclass(slots=True)
class Result:
    """Results of a run."""

    began: float
    """Start of the measured span on the monotonic clock."""
    ended: float
    """End of the measured span on the monotonic clock."""
    requests: int = 0
    """Number of requests that ended in the measured span."""
    chunks: int = 0
    """Number of events with text that arrived in the measured span."""
    good: int = 0
    """Number of answers without an incorrect byte."""
    failures: list[str] = field(default_factory=list)
    failed: int = 0
    arrivals: list[Arrivals] = field(default_factory=list)
    max_open: int = 0
    """Maximum number of open streams."""


class Connection(asyncio.Protocol):
    """A keep-alive connection with one stream at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stream: Stream | None = None
        self._length: int | None = None

    def connection_made(self, transport: Any) -> None:
        """Store the transport."""
        self.transport = transport

    def send(self, request: PreparedRequest) -> None:
        """Send a request."""
        self._length = None
        self._stream = Stream(request, time.monotonic())
        self.transport.write(request.data)

    def data_received(self, data: bytes) -> None:
        """Record the bytes and their arrival time."""
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
        """End the open stream with an error."""
        if self._stream is not None:
            self._stream.error = f"the connection was closed: {exc}"
            self._end(time.monotonic())
        self._client.closed(self)

    def _end(self, now: float) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.ended = now
            self._client.ended(self, stream)


class Client:
    """Runs one plan on one event loop."""

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
        """Send all streams of the plan; return start and end of the measured span."""
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

    def ended(self, connection: Connection, stream: Stream) -> None:
        """Store the answer, and send the next request if the plan says so."""
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

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close all connections."""
        for connection in tuple(self._idle):
            connection.transport.close()

    @property
    def open(self) -> int:
        """Number of streams that have not ended."""
        return self._open


def prepare_requests(vocabulary: Vocabulary, plan: Plan, replies: int) -> list[PreparedRequest]:
    """Return distinct requests."""
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


class Delta(msgspec.Struct):
    """Content that a chunk adds."""

    role: str = ""
    content: str = ""


class Choice(msgspec.Struct):
    """The choice of a chunk."""

    delta: Delta
    index: int
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Event(msgspec.Struct):
    """An event of a stream."""

    id: str
    object: str
    model: str
    created: int
    choices: list[Choice]
    usage: Usage | None = None


class Checker:
    """Checks raw answers byte by byte."""

    def __init__(self, vocabulary: Vocabulary, replies: list[int], plan: Plan) -> None:
        self._plan = plan
        self._replies = replies
        self._decode = vocabulary.tokenizer.decode
        self._read = msgspec.json.Decoder(Event).decode
        size = {token: len(vocabulary.tokenizer.id_to_token(token)) for token in set(replies)}
        self._ends = np.concatenate([[0], np.cumsum([size[token] for token in replies])])

    def check(self, stream: Stream) -> tuple[list[float], Arrivals | None]:
        """Return the arrival times of events with text, and those of tokens (None if ambiguous).

        Raises:
            ValueError: the answer is incorrect; says where.
        """
        if stream.error:
            raise ValueError(stream.error)
        head, _, rest = bytes(stream.raw).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 ") or b"text/event-stream" not in head:
            raise ValueError(bytes(stream.raw[:400]).decode(errors="replace"))
        times, counts = (np.array(column) for column in zip(*stream.marks, strict=True))
        when = times[np.searchsorted(counts, len(head) + 4 + np.array(events_end(rest)))]
        events = body(rest).decode().split("\n\n")
        if events[-2:] != ["data: [DONE]", ""] or len(events) != len(when) + 1:
            raise ValueError(f"the stream ends with {events[-3:]!r}")
        return self._events(stream, events[:-2], when)

    def _events(
        self, stream: Stream, events: list[str], when: NDArray[np.float64]
    ) -> tuple[list[float], Arrivals | None]:
        request, count = stream.request, self._plan.output_tokens
        parts: list[str] = []
        arrivals: list[float] = []
        reasons: list[str] = []
        usage = None
        for event, at in zip(events, when, strict=False):
            if not event.startswith("data: "):
                raise ValueError(f"not an event: {event!r}")
            read = self._read(event[6:])
            if read.object != "chat.completion.chunk" or read.model != "bench":
                raise ValueError(f"not a chunk: {event!r}")
            for choice in read.choices:
                if choice.delta.content:
                    parts.append(choice.delta.content)
                    arrivals.append(float(at))
                if choice.finish_reason is not None:
                    reasons.append(choice.finish_reason)
            usage = read.usage or usage
        text, wanted = "".join(parts), self._decode(self._replies[request.start : request.start + count])
        if text != wanted:
            raise ValueError(f"got {text[:200]!r}, expected {wanted[:200]!r}")
        if reasons != ["length"] or usage is None:
            raise ValueError(f"finish reasons {reasons}, usage {usage}")
        if (usage.prompt_tokens, usage.completion_tokens) != (request.tokens, count):
            raise ValueError(f"usage {usage}, expected {request.tokens} and {count}")
        if not self._plan.timings or "\ufffd" in wanted:
            return arrivals, None
        given = np.cumsum([len(part.encode()) for part in parts])
        ends = self._ends[request.start + 1 : request.start + 1 + count] - self._ends[request.start]
        return arrivals, Arrivals(request.key, stream.sent, np.array(arrivals)[np.searchsorted(given, ends)])


def chunks(rest: bytes) -> list[tuple[int, int]]:
    """Return start and end of the content of each chunk of an HTTP body.

    Raises:
        ValueError: the chunked encoding is invalid.
    """
    spans, at = [], 0
    while True:
        line = rest.index(b"\r\n", at)
        size = int(rest[at:line], 16)
        start = line + 2
        if rest[start + size : start + size + 2] != b"\r\n":
            raise ValueError(f"a chunk of {size} bytes does not end where it should")
        at = start + size + 2
        if not size:
            if at != len(rest):
                raise ValueError("something follows the last chunk")
            return spans
        spans.append((start, start + size))


def body(rest: bytes) -> bytes:
    """Return the joined chunks of an HTTP body."""
    return b"".join([rest[start:stop] for start, stop in chunks(rest)])


def events_end(rest: bytes) -> list[int]:
    """Return the byte of a chunked body at which each server-sent event is complete."""
    ends: list[int] = []
    for start, stop in chunks(rest):
        at = rest.find(b"\n\n", start, stop)
        while at >= 0:
            ends.append(at + 2)
            at = rest.find(b"\n\n", at + 2, stop)
    return ends


async def _drive(client: Client) -> tuple[float, float]:
    try:
        return await client.run()
    finally:
        client.close()


def drive(plan: Plan, cores: set[int], pipe: Any) -> None:
    """Run a plan in this process and send its result through a pipe."""
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
    if client.open:
        result.failed += client.open
        result.failures.append(f"{client.open} streams did not end")
    result.max_open = client.max_open
    for stream in client.streams:
        count_stream(result, checker, stream)
    pipe.send(result)


def count_stream(result: Result, checker: Checker, stream: Stream) -> None:
    """Check one stream and add it to the result."""
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
    """A client in its own process; `start` makes it send, `result` waits until it is done."""

    def __init__(self, plan: Plan, cores: set[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=drive, args=(plan, cores, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def start(self) -> None:
        """Start sending."""
        self._pipe.send("go")

    def result(self) -> Result:
        """Wait for the end of the run and return its result."""
        result = self._pipe.recv()
        self._process.join(10)
        return result
