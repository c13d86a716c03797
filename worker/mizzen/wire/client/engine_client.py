# SPDX-License-Identifier: Apache-2.0
"""The gateway's side of the wire protocol: a reconnecting client of one engine, on asyncio.

A connection is lost when it is closed, when the engine drops it or is silent for too long, or when a frame is
malformed. All requests on it then fail, and everything known about the engine is discarded. The next
connection uses a new socket, so that frames queued for the previous one can never reach the engine.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import zmq.asyncio
from numpy.typing import NDArray

from mizzen.wire.client.connection import EngineConnection
from mizzen.wire.client.file_download import FileDownloads
from mizzen.wire.client.handles import RequestHandles
from mizzen.wire.client.image_upload import ImageUploadCounts, ImageUploads, SentImage
from mizzen.wire.client.key_offers import KeyOffer
from mizzen.wire.client.stream import EmbedReply, EngineStream, StreamLost
from mizzen.wire.codec import MalformedFrame
from mizzen.wire.curve_keys import WireKeys
from mizzen.wire.endpoint import require_safe
from mizzen.wire.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    Blocks,
    Embed,
    Embedding,
    File,
    Generate,
    Hello,
    ImageContent,
    NeedImages,
    Outputs,
    RefusalCode,
    Refused,
    Sampling,
    Stats,
    Welcome,
    WireMessage,
)
from mizzen.wire.protocol_versions import ProtocolMismatch, check_version

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 2.0
_HELLO_REFUSED: Mapping[int, str] = {RefusalCode.INVALID: "protocol", RefusalCode.QUEUE_FULL: "full"}
"""`StreamLost.cause` of a rejected `Hello`, by the engine's rejection code."""


class EngineLink:
    """A client of one engine; it reconnects whenever the connection is lost. For use on one event loop."""

    def __init__(
        self,
        endpoint: str,
        *,
        gateway: str,
        context: zmq.asyncio.Context,
        keys: WireKeys | None = None,
        offers: Callable[[], Sequence[KeyOffer]] | None = None,
        timeout_seconds: float = 5.0,
        lost_seconds: float = 90.0,
        on_change: Callable[[], None] = lambda: None,
        on_blocks: Callable[[Blocks], None] = lambda blocks: None,
    ) -> None:
        """Create the client; `run` connects.

        Args:
            endpoint: ZMQ endpoint of the engine.
            gateway: name that this gateway sends to the engine.
            context: ZMQ context in which the sockets are created.
            keys: CURVE keys; None for a local endpoint.
            offers: function that returns the combinations of endpoint and keys to try in turn: at least one,
                several during a key rotation. None to use only `endpoint` with `keys`.
            timeout_seconds: time without a message after which the engine is `silent`; it may be running a
                long step.
            lost_seconds: time without a message after which the connection is given up.
            on_change: called when the engine connects, disconnects, becomes silent, or reports a new load.
            on_blocks: called with each change of the engine's prefix cache.

        Raises:
            UnsafeEndpoint: `keys` is missing, but other machines can reach the endpoint.
            ValueError: the endpoint is malformed.
        """
        require_safe(endpoint, keys)
        self.endpoint = endpoint
        self.welcome: Welcome | None = None
        """The engine's description of itself; None while disconnected."""
        self.stats: Stats | None = None
        self.problem = ""
        """Reason why the engine is disconnected or silent; empty if it is neither or the reason is
        unknown."""
        self.other_protocol = False
        """Whether the engine is unusable because it speaks another version of the wire protocol."""
        self.silent = False
        """Whether the engine is connected but has sent nothing for `timeout_seconds`."""
        self.malformed = 0
        self._gateway = gateway
        self._context = context
        self._offers = offers or (lambda: (KeyOffer(endpoint, keys),))
        self._tried = 0
        self._logged_reason = ""
        self.offer = KeyOffer(endpoint, keys)
        """Endpoint and keys of the current connection, or of the last attempt to connect."""
        self._timeout = timeout_seconds
        self._lost = max(timeout_seconds, lost_seconds)
        self._on_change = on_change
        self._on_blocks = on_blocks
        self._connection: EngineConnection | None = None
        self._files = FileDownloads(endpoint, self._send, 4 * timeout_seconds)
        self._handles = RequestHandles(self._send)
        self.image_counts = ImageUploadCounts()
        """Counters of the images sent to the engine."""
        self._images = ImageUploads(self._send_tracked, self.image_counts)
        self._blocks_next: int | None = None

    @property
    def draining(self) -> bool:
        """Whether the engine has announced that it accepts no new requests."""
        report = self.stats or self.welcome
        return report is not None and report.draining

    @property
    def protocol(self) -> int:
        """Version of the wire protocol that the connection uses; 0 while disconnected."""
        return 0 if self.welcome is None else self.welcome.protocol

    @property
    def accepts_images(self) -> bool:
        """Whether requests for the engine may have images; False while disconnected."""
        return self.welcome is not None and self.welcome.images

    @property
    def own_pooling(self) -> str:
        """Pooling of the model: that of its files, or else the default of its architecture.

        Empty for the last token by default, and while disconnected; may be the name of one that is not
        supported.
        """
        return "" if self.welcome is None else self.welcome.pooling

    @property
    def quiet_seconds(self) -> float:
        """Seconds since the engine's last message; 0 while disconnected."""
        return 0.0 if self._connection is None else self._connection.quiet_seconds

    def ping(self) -> None:
        """Probe the engine by requesting a small part of a file; if it is alive, it answers."""
        self._files.ping(self.welcome.files if self.welcome else {})

    def give_up(self, lost: StreamLost) -> None:
        """Abort all unfinished requests in the engine, and fail them with `lost`."""
        for handle in self._handles.all():
            self._handles.abort(handle)
            handle.fail(lost)

    @property
    def open_streams(self) -> int:
        """Number of requests that the engine has not answered completely."""
        return len(self._handles)

    async def run(self) -> None:
        """Connect, and reconnect whenever the connection is lost, until cancelled."""
        wait = FIRST_BACKOFF_SECONDS
        try:
            while True:
                began = time.monotonic()
                try:
                    await self._connect()
                except StreamLost as lost:
                    self.malformed += lost.cause == "malformed"
                    self._log_lost(lost)
                    self._reset(lost)
                except Exception as error:  # a bug in the gateway must not end the client permanently
                    log.exception("engine connection failed", extra={"fields": {"endpoint": self.endpoint}})
                    self._reset(StreamLost("internal", f"{type(error).__name__}: {error}"))
                if time.monotonic() - began > 4 * MAX_BACKOFF_SECONDS:
                    wait = FIRST_BACKOFF_SECONDS
                if self._tried % len(self._offers()):
                    continue  # try the other offers before waiting: the engine may accept one of them
                await asyncio.sleep(wait * (0.75 + 0.5 * random.random()))
                wait = min(2 * wait, MAX_BACKOFF_SECONDS)
        finally:
            self._reset(StreamLost("closed", "the gateway has left this engine"))

    def _log_lost(self, lost: StreamLost) -> None:
        fields = {"endpoint": self.endpoint, "cause": lost.cause, "reason": str(lost)}
        if self.welcome is not None:
            self._logged_reason = str(lost)
            log.warning("engine connection lost", extra={"fields": fields})
        elif self._tried % len(self._offers()) == 0 and self._logged_reason != str(lost):
            # a refused connection is not a warning: the engine may still be starting
            self._logged_reason = str(lost)
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
        traceparent: str = "",
        images: Sequence[SentImage] = (),
    ) -> EngineStream:
        """Send a request (`prompt`: int32 token ids) without waiting, and return its output stream.

        The last `generated` tokens of the prompt are output that another engine generated before it was lost:
        limits, penalties and grammar treat them as output, so `Sampling.max_tokens` must stay the limit of
        the original request. `traceparent` is the W3C trace context of the request's span; empty if the
        request is not traced. The bytes of `images` are sent if the engine requests them.

        Raises:
            EngineOverloaded: the connection's send queue is full.
            StreamLost: the engine is disconnected, or does not accept images although the request has some.
        """
        if images and not self.accepts_images:
            raise StreamLost("images", f"the engine at {self.endpoint} does not accept images")
        rid = self._handles.unused_handle()
        stream = EngineStream(
            rid,
            self._handles.abort,
            generated=generated,
            logprobs=None if sampling.logprobs is None else len(sampling.logprob_token_ids),
            prompt_logprobs=sampling.prompt_logprobs is not None,
            images={image.reference.digest: image.content for image in images},
        )
        queueing, references = (salt, priority, queue_seconds), tuple(image.reference for image in images)
        self._send(
            Generate(rid, prompt, sampling, *queueing, generated, tenant, traceparent, images=references)
        )
        self._handles.add(stream)
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
        traceparent: str = "",
        classify: bool = False,
        second_start: int = 0,
    ) -> tuple[NDArray[np.float32], int, int]:
        """Return the embedding (float32 [size]) of a prompt (int32 token ids), and two token counts.

        The counts are the number of prompt tokens, and how many of them came from the prefix cache. `pooling`
        is "last", "mean" or "cls"; `normalize` scales the vector to length 1. With `classify`, the vector has
        the logits of the model's labels instead, float32 [labels]. Tokens from `second_start` on, unless it
        is 0, are the second text of a pair. Cancelling the call aborts the request.

        Raises:
            EngineRefused: the engine rejects the request.
            EngineOverloaded: the connection's send queue is full.
            StreamLost: the engine is disconnected, the connection was lost, or the engine failed.
        """
        rid = self._handles.unused_handle()
        reply = EmbedReply(rid)
        queueing = (salt, priority, queue_seconds)
        self._send(Embed(rid, prompt, pooling, normalize, *queueing, traceparent, classify, second_start))
        self._handles.add(reply)
        try:
            embedding = await reply.answer
        finally:
            if reply in self._handles:
                self._handles.abort(reply)
        vector = np.frombuffer(embedding.vector, "<f4")
        return vector, embedding.prompt_tokens, embedding.cached_tokens

    async def fetch_files(self, names: Iterable[str]) -> dict[str, bytes]:
        """Download files from the engine and return their contents by name; unknown names are skipped.

        Raises:
            StreamLost: the engine is disconnected, the connection was lost, or a part did not arrive in time.
            MalformedFrame: the received parts do not add up to the size that the engine announced.
        """
        welcome = self.welcome
        if welcome is None:
            raise StreamLost("connection", f"not connected to {self.endpoint}")
        return await self._files.fetch({name: welcome.files[name] for name in names if name in welcome.files})

    # ── one connection ────────────────────────────────────────────────────────────────────────────────────

    async def _connect(self) -> None:
        """Run one connection, with the next offer of endpoint and keys.

        Raises:
            StreamLost: always, when the connection ends.
        """
        offers = self._offers()
        self.offer = offers[self._tried % len(offers)]
        self._tried += 1  # the next attempt uses the next offer; a `Welcome` resets the count
        self._connection = EngineConnection(
            self.endpoint,
            self._context,
            self.offer,
            timeout_seconds=self._timeout,
            take=self._dispatch,
            on_silence=self._silence,
        )
        await self._connection.run(Hello(OLDEST_PROTOCOL, self._gateway, PROTOCOL))

    def _silence(self, silent: bool) -> None:
        self.silent = silent
        self.problem = f"{self.endpoint} is silent" if silent else ""
        if silent:
            fields = {"endpoint": self.endpoint, "streams": len(self._handles)}
            log.warning("engine is silent", extra={"fields": fields})
        self._on_change()

    def _send(self, message: WireMessage) -> None:
        self._require_connection().send(message)

    def _send_tracked(self, message: ImageContent) -> zmq.MessageTracker:
        return self._require_connection().send_tracked(message)

    def _require_connection(self) -> EngineConnection:
        if self._connection is None:
            raise StreamLost("connection", f"not connected to {self.endpoint}")
        return self._connection

    # ── messages from the engine ──────────────────────────────────────────────────────────────────────────

    def _dispatch(self, message: WireMessage) -> None:
        if isinstance(message, Outputs):
            self._handles.add_outputs(message)
        elif isinstance(message, Stats):
            self.stats = message
            self._on_change()
        elif isinstance(message, Blocks):
            self._blocks(message)
        elif isinstance(message, Refused):
            self._refused(message)
        elif isinstance(message, Embedding):
            self._handles.set_embedding(message)
        elif isinstance(message, File):
            self._files.add_part(message)
        elif isinstance(message, NeedImages):
            self._handles.start_uploads(message, self._images)
        elif isinstance(message, Welcome):
            self._welcomed(message)

    def _welcomed(self, message: Welcome) -> None:
        try:
            check_version(message, self.endpoint)
        except ProtocolMismatch as mismatch:
            raise StreamLost("protocol", str(mismatch)) from None
        if self.welcome is not None and self.welcome.incarnation != message.incarnation:
            raise StreamLost("restart", f"the engine at {self.endpoint} has restarted")
        self.welcome, self.problem, self._tried = message, "", 0
        self.other_protocol = False
        if self._connection is not None:
            self._connection.patience = self._lost
        self._on_change()

    def _refused(self, message: Refused) -> None:
        if message.code == RefusalCode.UNKNOWN_PEER:
            raise StreamLost("forgotten", f"{self.endpoint}: {message.message}")
        if message.rid is not None:
            self._handles.fail_refused(message.rid, message)
        elif self.welcome is None:  # the engine rejected the Hello
            cause = _HELLO_REFUSED.get(message.code, "refused")
            raise StreamLost(cause, f"{self.endpoint}: {message.message}")
        else:
            fields = {"endpoint": self.endpoint, "reason": message.message}
            log.warning("engine rejected a frame", extra={"fields": fields})

    def _blocks(self, message: Blocks) -> None:
        if len(message.stored) % 8 or len(message.evicted) % 8:
            raise MalformedFrame("a column of Blocks is not an array of 64-bit hashes")
        if not message.reset and message.sequence != self._blocks_next:
            raise StreamLost("gap", f"cache events {self._blocks_next} of {self.endpoint} are missing")
        self._blocks_next = message.sequence + 1
        self._on_blocks(message)

    def _reset(self, lost: StreamLost) -> None:
        self.welcome = self.stats = self._blocks_next = None
        self.silent, self.problem, self.other_protocol = False, str(lost), lost.cause == "protocol"
        self._handles.fail_all(lost)
        self._files.fail(lost)
        self._images.drop()
        self._on_change()
