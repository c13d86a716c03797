"""The gateway's side of the wire: one DEALER socket an engine, on asyncio.

A connection lives from its handshake until it is lost: closed, silent for too long, forgotten by the engine,
or speaking nonsense. What was known and asked of the engine ends with it, and the next connection starts with
a socket of its own, so that nothing queued for the former one can reach the engine late.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray
from zmq.utils.monitor import recv_monitor_message

from mizzen.wire.codec import MalformedFrame, encode, gateway_decoder
from mizzen.wire.endpoint import heartbeats, require_safe, secure_client
from mizzen.wire.keys import WireKeys
from mizzen.wire.messages import (
    FILE_PART_BYTES,
    MAX_FRAME_BYTES,
    PROTOCOL,
    Abort,
    Blocks,
    Embed,
    Embedding,
    FetchFile,
    File,
    Generate,
    Hello,
    Message,
    Outputs,
    RefusalCode,
    Refused,
    Sampling,
    Stats,
    Welcome,
)
from mizzen.wire.offers import Offer
from mizzen.wire.readiness import Readiness
from mizzen.wire.stream import EmbedReply, EngineRefused, EngineStream, StreamLost

log = logging.getLogger(__name__)

SEND_FRAMES = 1000
RECEIVE_FRAMES = 4000
FRAMES_A_TURN = 32
"""Frames handled before other tasks get their turn."""
MAX_FILES_BYTES = 512 * 1024 * 1024
FIRST_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 2.0
NEVER_MILLISECONDS = 3_600_000
EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH
EVENTS |= zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.CLOSED


async def first_to_fail(*work: Coroutine[Any, Any, None]) -> None:
    """Run coroutines side by side until one of them raises, end the others, and raise its error."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EngineOverloaded(Exception):
    """The engine does not take frames at the moment; nothing was sent."""


class Link:
    """A connection to one engine that is made again whenever it is lost. All on one event loop."""

    def __init__(
        self,
        endpoint: str,
        *,
        gateway: str,
        context: zmq.asyncio.Context,
        keys: WireKeys | None = None,
        offers: Callable[[], Sequence[Offer]] | None = None,
        timeout_seconds: float = 5.0,
        lost_seconds: float = 90.0,
        on_change: Callable[[], None] = lambda: None,
        on_blocks: Callable[[Blocks], None] = lambda blocks: None,
    ) -> None:
        """Prepare; `run` connects.

        An engine that says nothing for `timeout_seconds` is `silent`; after `lost_seconds` the connection is
        given up. In between, it may be in a long step: what runs there is not lost by that.

        `offers` are tried in turn where `endpoint` and `keys` alone are not all that may work: one at least.

        `on_change` is called when the engine has come, gone, or says something else of itself or its load.

        Raises:
            UnsafeEndpoint: reachable from other machines, and no keys.
            ValueError: the endpoint is malformed.
        """
        require_safe(endpoint, keys)
        self.endpoint = endpoint
        self.welcome: Welcome | None = None
        """What the engine said of itself; None while there is no connection."""
        self.stats: Stats | None = None
        self.problem = ""
        """Why there is no connection, once that is known."""
        self.silent = False
        """Whether it is connected and has said nothing for longer than it should."""
        self.malformed = 0
        self._gateway = gateway
        self._context = context
        self._offers = offers or (lambda: (Offer(endpoint, keys),))
        self._tried = 0
        self._told = ""
        self.offer = Offer(endpoint, keys)
        """What the connection was made with, or tried last."""
        self._timeout = timeout_seconds
        self._lost = max(timeout_seconds, lost_seconds)
        self._on_change = on_change
        self._on_blocks = on_blocks
        self._decode = gateway_decoder()
        self._socket: zmq.Socket[bytes] | None = None
        self._readiness: Readiness | None = None
        self._streams: dict[int, EngineStream | EmbedReply] = {}
        self._parts: dict[tuple[str, int], asyncio.Future[File]] = {}
        self._blocks_next: int | None = None
        self._rid = random.randrange(2**20)
        self._heard = 0.0

    @property
    def draining(self) -> bool:
        """Whether the engine says that it takes nothing new."""
        said = self.stats or self.welcome
        return said is not None and said.draining

    @property
    def quiet_seconds(self) -> float:
        """For how many seconds the engine has said nothing."""
        return self._quiet()

    def ping(self) -> None:
        """Ask for something small, so that an engine that lives is heard."""
        files = self.welcome.files if self.welcome else {}
        if files:
            name = min(files, key=lambda one: files[one] % FILE_PART_BYTES)
            try:
                self._send(FetchFile(name, files[name] // FILE_PART_BYTES * FILE_PART_BYTES))
            except (EngineOverloaded, StreamLost):
                return  # silence is what is looked for

    def give_up(self, lost: StreamLost) -> None:
        """Abort all requests and replies whose handles are in use, and fail the handles."""
        for stream in tuple(self._streams.values()):
            self._abort(stream)
            stream.fail(lost)

    @property
    def open_streams(self) -> int:
        """Requests whose handles are in use."""
        return len(self._streams)

    async def run(self) -> None:
        """Connect, and connect again whenever the connection is lost; until cancelled."""
        wait = FIRST_BACKOFF_SECONDS
        try:
            while True:
                began = time.monotonic()
                try:
                    await self._connection()
                except StreamLost as lost:
                    self._tell(lost)
                    self._reset(lost)
                except Exception as error:  # a fault of ours must not end the link for good
                    log.exception("engine connection failed", extra={"fields": {"endpoint": self.endpoint}})
                    self._reset(StreamLost("internal", f"{type(error).__name__}: {error}"))
                if time.monotonic() - began > 4 * MAX_BACKOFF_SECONDS:
                    wait = FIRST_BACKOFF_SECONDS
                if self._tried % len(self._offers()):
                    continue  # the others first: one of them may be what the engine knows
                await asyncio.sleep(wait * (0.75 + 0.5 * random.random()))
                wait = min(2 * wait, MAX_BACKOFF_SECONDS)
        finally:
            self._reset(StreamLost("closed", "the gateway has left this engine"))

    def _tell(self, lost: StreamLost) -> None:
        fields = {"endpoint": self.endpoint, "cause": lost.cause, "reason": str(lost)}
        if self.welcome is not None:
            self._told = str(lost)
            log.warning("engine connection lost", extra={"fields": fields})
        elif self._tried % len(self._offers()) == 0 and self._told != str(lost):
            self._told = str(lost)  # one that is not there yet is nothing to warn of
            level = logging.INFO if lost.cause == "connection" else logging.WARNING
            log.log(level, "engine does not answer", extra={"fields": fields})

    def generate(
        self,
        prompt: bytes,
        sampling: Sampling,
        *,
        salt: bytes = b"",
        priority: int = 0,
        queue_seconds: float = 0.0,
        generated: int = 0,
        tenant: int = 0,
    ) -> EngineStream:
        """Send a request (`prompt`: int32 token ids) without waiting.

        The last `generated` tokens of the prompt are output already, which another engine gave: limits,
        penalties and grammar count them, and `Sampling.max_tokens` stays the request's own.

        Raises:
            EngineOverloaded: the engine's queue of frames is full.
            StreamLost: there is no connection.
        """
        rid = self._next_rid()
        stream = EngineStream(
            rid,
            self._abort,
            generated=generated,
            logprobs=None if sampling.logprobs is None else len(sampling.logprob_token_ids),
            prompt_logprobs=sampling.prompt_logprobs is not None,
        )
        self._send(Generate(rid, prompt, sampling, salt, priority, queue_seconds, generated, tenant))
        self._streams[rid] = stream
        return stream

    async def embed(
        self,
        prompt: bytes,
        pooling: str = "last",
        normalize: bool = True,
        *,
        salt: bytes = b"",
        priority: int = 0,
        queue_seconds: float = 0.0,
    ) -> tuple[NDArray[np.float32], int, int]:
        """Return the embedding (float32 [hidden size]) of a prompt (int32 token ids).

        `pooling` is "last" or "mean"; `normalize` scales the vector to length 1. The other two numbers are
        the prompt's tokens, and how many of them came from the prefix cache. Cancelling aborts the request.

        Raises:
            EngineRefused: the engine does not take the request.
            EngineOverloaded: the engine's queue of frames is full.
            StreamLost: there is no connection, it was lost, or the engine failed.
        """
        rid = self._next_rid()
        reply = EmbedReply(rid)
        self._send(Embed(rid, prompt, pooling, normalize, salt, priority, queue_seconds))
        self._streams[rid] = reply
        try:
            embedding = await reply.answer
        finally:
            if self._streams.get(rid) is reply:
                self._abort(reply)
        vector = np.frombuffer(embedding.vector, "<f4")
        return vector, embedding.prompt_tokens, embedding.cached_tokens

    async def fetch_files(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the named files of the engine, those that it has.

        Raises:
            StreamLost: the connection was lost, or the engine did not answer in time.
            MalformedFrame: the engine's parts do not make the file that it announced.
        """
        welcome = self.welcome
        if welcome is None:
            raise StreamLost("connection", f"not connected to {self.endpoint}")
        sizes = {name: welcome.files[name] for name in names if name in welcome.files}
        if sum(sizes.values()) > MAX_FILES_BYTES or any(size < 0 for size in sizes.values()):
            raise MalformedFrame(f"the engine announces files of {sum(sizes.values())} bytes")
        return {name: await self._file(name, size) for name, size in sizes.items()}

    async def _file(self, name: str, size: int) -> bytes:
        content = bytearray()
        while True:
            part = await self._part(name, len(content))
            content += part.content
            if part.size != size or len(content) > size or (not part.content and len(content) < size):
                raise MalformedFrame(f"{name}: {size} bytes were announced, the parts differ")
            if len(content) == size:
                return bytes(content)

    async def _part(self, name: str, offset: int) -> File:
        future: asyncio.Future[File] = asyncio.get_running_loop().create_future()
        self._parts[name, offset] = future
        try:
            self._send(FetchFile(name, offset))
            async with asyncio.timeout(4 * self._timeout):
                return await future
        except EngineOverloaded as error:
            raise StreamLost("overloaded", str(error)) from error
        except TimeoutError:
            raise StreamLost("silent", f"{self.endpoint} did not send {name}") from None
        finally:
            self._parts.pop((name, offset), None)

    # ── one connection ────────────────────────────────────────────────────────────────────────────────────

    async def _connection(self) -> None:
        """Run one connection.

        Raises:
            StreamLost: always, in the end.
        """
        ways = self._offers()
        self.offer = offer = ways[self._tried % len(ways)]
        self._tried += 1  # the next time another one, unless this one works
        socket = self._open(offer)
        monitor = socket.get_monitor_socket(int(EVENTS))
        self._socket, self._heard = socket, time.monotonic()
        try:
            socket.connect(offer.endpoint)
            await self._handshake(monitor)
            self._heard = time.monotonic()
            self._send(Hello(PROTOCOL, self._gateway))
            await first_to_fail(
                self._receive(socket), self._watch_connection(socket, monitor), self._watch_silence()
            )
        except TimeoutError:
            raise StreamLost("connection", f"{self.endpoint} does not answer") from None
        except (zmq.ZMQError, EngineOverloaded) as error:
            raise StreamLost("connection", f"{self.endpoint}: {error}") from error
        finally:
            self._socket = None
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    def _open(self, offer: Offer) -> zmq.Socket[bytes]:
        # A plain socket: `Readiness` tells when frames are there, and only its monitor is awaited.
        plain: Any = zmq.Socket
        socket: Any = self._context.socket(zmq.DEALER, plain)
        socket.linger = 0
        socket.sndhwm = SEND_FRAMES
        socket.rcvhwm = RECEIVE_FRAMES
        socket.maxmsgsize = MAX_FRAME_BYTES
        socket.ipv6 = "[" in self.endpoint
        # `run` makes connections again, each with a socket of its own. (With ZMQ_IMMEDIATE instead, libzmq
        # throws away what was received and not yet read when the connection ends.)
        socket.reconnect_ivl = NEVER_MILLISECONDS
        heartbeats(socket, max(0.2, self._timeout / 5), self._timeout)
        if offer.keys:
            secure_client(socket, offer.keys)
        return socket

    async def _handshake(self, monitor: Any) -> None:
        async with asyncio.timeout(self._timeout):
            event = (await recv_monitor_message(monitor))["event"]
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            return
        if event in (zmq.Event.CLOSED, zmq.Event.DISCONNECTED):
            raise StreamLost("connection", f"{self.endpoint} does not take connections")
        raise StreamLost("handshake", f"{self.endpoint} refuses this gateway's keys, or speaks no ZMTP")

    async def _watch_connection(self, socket: zmq.Socket[bytes], monitor: Any) -> None:
        await recv_monitor_message(monitor)
        # The news of the end overtakes what came before it: a drained engine says its last and closes.
        unread = True
        while unread:
            unread = self._read(socket) == FRAMES_A_TURN
            await asyncio.sleep(0)
        raise StreamLost("connection", f"the connection to {self.endpoint} was closed")

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(self._timeout / 4)
            if self._quiet() <= self._timeout:
                continue
            await asyncio.sleep(0.1)  # this loop itself may have been late: let it read what has arrived
            if self._quiet() > (self._lost if self.welcome else self._timeout):
                raise StreamLost("silent", f"{self.endpoint} was silent for {self._quiet():.1f} s")
            if self._quiet() > self._timeout and self.welcome and not self.silent:
                self.silent = True
                self.problem = f"{self.endpoint} is silent"
                fields = {"endpoint": self.endpoint, "streams": len(self._streams)}
                log.warning("engine is silent", extra={"fields": fields})
                self._on_change()

    def _quiet(self) -> float:
        """Return for how many seconds the engine has said nothing."""
        return time.monotonic() - self._heard

    async def _receive(self, socket: zmq.Socket[bytes]) -> None:
        self._readiness = readiness = Readiness(socket, lambda: self._read(socket) == FRAMES_A_TURN)
        try:
            await readiness.run()
        finally:
            self._readiness = None

    def _read(self, socket: zmq.Socket[bytes]) -> int:
        """Handle the frames that are here, `FRAMES_A_TURN` at most, and return how many there were."""
        for count in range(FRAMES_A_TURN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return count
            self._heard = time.monotonic()
            if self.silent:
                self.silent, self.problem = False, ""
                self._on_change()
            try:
                self._take(self._one(frames))
            except MalformedFrame as error:
                self.malformed += 1
                raise StreamLost("malformed", f"{self.endpoint}: {error}") from error
        return FRAMES_A_TURN

    def _one(self, frames: list[bytes]) -> Message:
        if len(frames) != 1:
            raise MalformedFrame(f"{len(frames)} frames in one message; the protocol has one")
        return self._decode(frames[0])

    def _send(self, message: Message) -> None:
        if self._socket is None:
            raise StreamLost("connection", f"not connected to {self.endpoint}")
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineOverloaded(f"{self.endpoint} does not take frames") from None
        except zmq.ZMQError as error:
            raise StreamLost("connection", f"{self.endpoint}: {error}") from error
        if self._readiness is not None:
            self._readiness.sent()

    # ── what the engine says ──────────────────────────────────────────────────────────────────────────────

    def _take(self, message: Message) -> None:
        if isinstance(message, Outputs):
            self._outputs(message)
        elif isinstance(message, Stats):
            self.stats = message
            self._on_change()
        elif isinstance(message, Blocks):
            self._blocks(message)
        elif isinstance(message, Refused):
            self._refused(message)
        elif isinstance(message, Embedding):
            self._embedding(message)
        elif isinstance(message, File):
            future = self._parts.get((message.name, message.offset))
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, Welcome):
            self._welcomed(message)

    def _welcomed(self, message: Welcome) -> None:
        if message.protocol != PROTOCOL:
            text = f"{self.endpoint} speaks protocol {message.protocol}, this gateway {PROTOCOL}"
            raise StreamLost("protocol", text)
        if self.welcome is not None and self.welcome.incarnation != message.incarnation:
            raise StreamLost("restart", f"the engine at {self.endpoint} has restarted")
        self.welcome, self.problem, self._tried = message, "", 0
        self._on_change()

    def _outputs(self, message: Outputs) -> None:
        try:
            rids = np.frombuffer(message.rids, "<u4").tolist()
            offsets = np.frombuffer(message.offsets, "<u4").tolist()
            tokens = np.frombuffer(message.tokens, "<i4").tolist()
            counts = np.frombuffer(message.counts, "<u2").tolist() if message.counts else [1] * len(rids)
        except ValueError as error:
            raise MalformedFrame(f"a column of Outputs: {error}") from error
        if not len(rids) == len(offsets) == len(counts) or sum(counts) != len(tokens):
            raise MalformedFrame("the columns of Outputs differ in length")
        for report in message.logprobs:
            stream = self._streams.get(report.rid)
            if stream is not None:
                try:
                    stream.report(report)
                except ValueError as error:
                    raise MalformedFrame(f"log probabilities of Outputs: {error}") from error
        start = 0
        for rid, offset, count in zip(rids, offsets, counts, strict=True):
            stream = self._streams.get(rid)
            if stream is not None:
                stream.feed(offset, tokens[start : start + count])
            start += count
        for finish in message.finished:
            stream = self._streams.pop(finish.rid, None)
            if stream is not None:
                stream.end(finish)

    def _embedding(self, message: Embedding) -> None:
        if not message.vector or len(message.vector) % 4:
            raise MalformedFrame(f"an embedding of {len(message.vector)} bytes is no float32 vector")
        reply = self._streams.pop(message.rid, None)
        if isinstance(reply, EmbedReply):
            reply.give(message)

    def _refused(self, message: Refused) -> None:
        if message.code == RefusalCode.UNKNOWN_PEER:
            raise StreamLost("forgotten", f"{self.endpoint}: {message.message}")
        if message.rid is not None:
            stream = self._streams.pop(message.rid, None)
            if stream is not None:
                stream.fail(EngineRefused(message.code, message.message, message.retry_after_seconds))
        elif self.welcome is None:  # the Hello was refused
            raise StreamLost("protocol", f"{self.endpoint}: {message.message}")
        else:
            fields = {"endpoint": self.endpoint, "reason": message.message}
            log.warning("engine refused a frame", extra={"fields": fields})

    def _blocks(self, message: Blocks) -> None:
        if len(message.stored) % 8 or len(message.evicted) % 8:
            raise MalformedFrame("a column of Blocks is no array of 64-bit names")
        if not message.reset and message.sequence != self._blocks_next:
            raise StreamLost("gap", f"cache events {self._blocks_next} of {self.endpoint} are missing")
        self._blocks_next = message.sequence + 1
        self._on_blocks(message)

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────

    def _next_rid(self) -> int:
        self._rid = (self._rid + 1) % 2**32
        while self._rid in self._streams:
            self._rid = (self._rid + 1) % 2**32
        return self._rid

    def _abort(self, stream: EngineStream | EmbedReply) -> None:
        """Tell the engine; the handle stays taken until it answers."""
        try:
            self._send(Abort(stream.rid))
        except EngineOverloaded:
            asyncio.get_running_loop().call_later(0.1, self._abort_again, stream)
        except StreamLost:
            pass  # the engine aborts what a lost connection has left

    def _abort_again(self, stream: EngineStream | EmbedReply) -> None:
        if self._streams.get(stream.rid) is stream:
            self._abort(stream)

    def _reset(self, lost: StreamLost) -> None:
        self.welcome = self.stats = self._blocks_next = None
        self.silent, self.problem = False, str(lost)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(lost)
        for part in self._parts.values():
            if not part.done():
                part.set_exception(lost)
        self._on_change()
