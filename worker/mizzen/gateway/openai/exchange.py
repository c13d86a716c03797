"""One request and its response, from the body to the last byte, as an ASGI application."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mizzen.gateway.admit import Ticket
from mizzen.gateway.dispatch import Job, Running
from mizzen.gateway.errors import ApiError, unavailable
from mizzen.gateway.metrics import Metrics
from mizzen.gateway.openai.answer import Answer
from mizzen.gateway.openai.wish import Wish
from mizzen.gateway.openai.writers import DONE, Writer, event
from mizzen.wire.messages import Finish
from mizzen.wire.stream import EngineRefused, StreamLost

if TYPE_CHECKING:
    from mizzen.gateway.service import Gateway

log = logging.getLogger(__name__)

FINAL_SECONDS = 2.0
"""How long usage waits for an engine's count after an abort."""
SEND_SECONDS = 60.0
"""A client that takes nothing for this long is given up."""
BODY_SECONDS = 60.0


class ClientGone(Exception):
    """The client has closed the connection, or takes nothing."""


class Deliveries:
    """Counts an answer's tokens, and the time between their deliveries."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last: float | None = None

    def took(self, tokens: int) -> None:
        """Note tokens that have just come."""
        now = time.monotonic()
        self._metrics.output_tokens.inc(tokens)
        if self._last is not None and tokens:
            self._metrics.between_tokens_seconds.observe((now - self._last) / tokens)
        self._last = now


class Exchange(Response):
    """Serves one chat or text completion."""

    def __init__(
        self, gateway: Gateway, parse: Callable[[bytes], Wish], writer: Callable[[Wish], Writer]
    ) -> None:
        self._gateway = gateway
        self._parse = parse
        self._new_writer = writer
        self._began = time.monotonic()
        self._started = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request; a client that goes away ends it, and aborts it in the engine."""
        self._send = send
        metrics = self._gateway.metrics
        try:
            body = await read_body(scope, receive, self._gateway.config.max_body_bytes)
            work = asyncio.create_task(self._serve(self._parse(body)))
            gone = asyncio.create_task(disconnected(receive))
            try:
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise ClientGone("the client closed the connection")
                await work
            finally:
                for task in (work, gone):
                    task.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)
        except ApiError as error:
            await self._error(error)
        except ClientGone as error:
            metrics.aborts.labels("client").inc()
            log.debug("client gone", extra={"fields": {"reason": str(error)}})
        finally:
            metrics.request_seconds.observe(time.monotonic() - self._began)

    async def _serve(self, wish: Wish) -> None:
        gateway = self._gateway
        gateway.check_model(wish.model)
        gateway.check_open()
        job = Job(wish=wish, ticket=Ticket(self._began + gateway.config.queue_timeout_seconds))
        try:
            running = await gateway.dispatcher.place(job)
            gateway.metrics.queue_seconds.observe(job.ticket.waited)
            gateway.metrics.first_token_seconds.observe(time.monotonic() - self._began)
            gateway.metrics.prompt_tokens.inc(len(job.prompt))
            if wish.stream:
                await self._stream(job, running)
            else:
                await self._whole(job, running)
        finally:
            gateway.dispatcher.leave(job)

    # ── a stream ──────────────────────────────────────────────────────────────────────────────────────────

    async def _stream(self, job: Job, running: Running) -> None:
        wish, writer, answer = job.wish, self._new_writer(job.wish), self._answer(job)
        times = Deliveries(self._gateway.metrics)
        try:
            await self._start(200, [(b"content-type", b"text/event-stream; charset=utf-8"), *NO_CACHE])
            events, held, reason = writer.first(), [], None
            while reason is None:
                piece = answer.add(*await running.next())
                times.took(len(piece.ids))
                reason, held = piece.reason, held + piece.ids
                if piece.text or reason is not None or (held and wish.return_token_ids):
                    events += writer.piece(piece.text, held, reason)
                    held = []
                if reason is None and events:
                    await self._write(events)
                    events = b""
            if wish.include_usage:
                if running.finish is None:
                    await self._write(events)
                    events = b""
                events += writer.usage(answer.usage(await self._finish(running)))
            await self._write(events + DONE, more=False)
        except (StreamLost, EngineRefused) as error:
            cause = error.cause if isinstance(error, StreamLost) else "refused"
            self._gateway.metrics.stream_errors.labels(cause).inc()
            await self._error(ApiError(502, f"the answer broke off: {error}", code="engine_lost"))
        finally:
            self._close(running, answer)

    # ── a whole response ──────────────────────────────────────────────────────────────────────────────────

    async def _whole(self, job: Job, running: Running) -> None:
        """Collect the answer. While nothing has been sent, an engine that is lost costs only time."""
        while True:
            answer = self._answer(job)
            try:
                body = await self._collect(job.wish, running, answer)
                break
            except (StreamLost, EngineRefused) as error:
                lost = error if isinstance(error, StreamLost) else StreamLost("refused", str(error))
                engine = running.engine
            finally:
                self._close(running, answer)
            self._gateway.dispatcher.lost(job, engine, lost)
            running = await self._gateway.dispatcher.place(job)
        await self._start(200, [(b"content-type", b"application/json")], len(body))
        await self._write(body, more=False)

    async def _collect(self, wish: Wish, running: Running, answer: Answer) -> bytes:
        parts: list[str] = []
        ids: list[int] = []
        reason = None
        times = Deliveries(self._gateway.metrics)
        while reason is None:
            piece = answer.add(*await running.next())
            times.took(len(piece.ids))
            parts.append(piece.text)
            ids += piece.ids
            reason = piece.reason
        usage = answer.usage(await self._finish(running))
        return self._new_writer(wish).whole("".join(parts), ids, reason, usage)

    # ── both ──────────────────────────────────────────────────────────────────────────────────────────────

    def _answer(self, job: Job) -> Answer:
        if job.text is None:
            raise unavailable("no engine is ready")
        return Answer(job.text.tokenizer, job.wish.sampling.stop, len(job.prompt))

    async def _finish(self, running: Running) -> Finish | None:
        """Return the engine's end of a request; one that a stop string has ended is aborted first."""
        if running.finish is None:
            running.stream.abort()
            self._gateway.metrics.aborts.labels("stop_string").inc()
            running.finish = await running.stream.final(FINAL_SECONDS)
        return running.finish

    def _close(self, running: Running, answer: Answer) -> None:
        running.close()
        if running.finish is not None:
            self._gateway.metrics.cached_tokens.inc(running.finish.cached_tokens)

    async def _start(
        self, status: int, headers: list[tuple[bytes, bytes]], length: int | None = None
    ) -> None:
        if length is not None:
            headers = [*headers, (b"content-length", str(length).encode())]
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, data: bytes, more: bool = True) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except (TimeoutError, OSError) as error:
            raise ClientGone(f"the client took nothing for {SEND_SECONDS:g} s") from error

    async def _error(self, error: ApiError) -> None:
        """Answer with an error; in a stream that has begun, with an event that ends it without [DONE]."""
        body = error.body()
        if self._started:
            await self._write(event(body), more=False)
            return
        await self._start(error.status, error.headers(), len(body))
        await self._write(body, more=False)


NO_CACHE = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: 413 when it is longer than `limit` bytes, 408 when it does not come.
        ClientGone: the client closed the connection.
    """
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > limit:
        raise too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("the client closed the connection while it sent its request")
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_large(limit)
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None


def too_large(limit: int) -> ApiError:
    """Return a 413."""
    return ApiError(413, f"the body is longer than {limit} bytes (--max-body-bytes)", code="body_too_large")


async def disconnected(receive: Receive) -> None:
    """Return once the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
