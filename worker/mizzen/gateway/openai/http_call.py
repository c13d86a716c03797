"""One HTTP request and its response, from the body to the last byte, as an ASGI application."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mizzen.gateway.errors import ApiError
from mizzen.gateway.http.connection import WRITER_KEY, ConnectionWriter
from mizzen.gateway.http.deadlines import RequestDeadline
from mizzen.gateway.http.request_bodies import ClientGone, RequestBody
from mizzen.gateway.telemetry.request_record import get_record

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

log = logging.getLogger(__name__)

SEND_SECONDS = 60.0
"""A client that takes nothing for this long is given up."""


class Call(Response):
    """Reads a body within bounds, and serves it while the client is there; errors have OpenAI's shape."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._began = time.monotonic()
        self._started = False
        self.background = None

    @abstractmethod
    async def _serve(self, body: bytes) -> None:
        """Answer a body.

        Raises:
            ApiError: it cannot be served.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request; a client that goes away ends it, and aborts it in the engine."""
        self._scope, self._send = scope, send
        self._output: ConnectionWriter | None = scope.get(WRITER_KEY)
        try:
            try:
                async with RequestDeadline(self._gateway.config, scope, self._began) as self._time:
                    await self._read_and_serve(scope, receive)
            except ApiError as error:
                await self._error(error)
        except ClientGone as error:
            get_record(scope).error = "client_gone"
            self._gateway.metrics.aborts.labels("client").inc()
            log.debug("client gone", extra={"fields": {"reason": str(error)}})

    async def _read_and_serve(self, scope: Scope, receive: Receive) -> None:
        gateway = self._gateway
        with RequestBody(gateway.body_budget, gateway.config.max_body_bytes) as body:
            work = asyncio.create_task(self._serve(await body.read(scope, receive)))
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
                del work, gone  # an error that a task has would refer to it, and wait for the collector

    async def _answer(self, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """Send a whole JSON response."""
        await self._start(200, [(b"content-type", b"application/json"), *(headers or ())], len(body))
        await self._write(body, more=False)

    async def _start(
        self, status: int, headers: list[tuple[bytes, bytes]], length: int | None = None
    ) -> None:
        if length is not None:
            headers = [*headers, (b"content-length", str(length).encode())]
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _write_now(self, data: bytes) -> bool:
        """Send a part of a stream, if the client takes it now."""
        return self._output is not None and self._output.write(data)

    def _cut(self) -> None:
        """End the connection at once, whatever waits for the client."""
        if self._output is not None:
            self._output.abort()

    async def _write(self, data: bytes, more: bool = True) -> None:
        """Send a part of the response.

        Raises:
            ClientGone: the client takes nothing.
        """
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except (TimeoutError, OSError) as error:
            raise ClientGone(f"the client took nothing for {SEND_SECONDS:g} s") from error

    async def _error(self, error: ApiError) -> None:
        """Answer with an error; once a stream has begun, with an event that ends it."""
        get_record(self._scope).error = error.code or error.error_type
        if self._started:
            await self._write(self._failed(error), more=False)
            return
        body = error.body()
        await self._start(error.status, error.headers(), len(body))
        await self._write(body, more=False)

    def _failed(self, error: ApiError) -> bytes:
        """Return what ends a stream that cannot go on; there is no [DONE] behind it."""
        return b"data: " + error.body() + b"\n\n"


class JsonCall(Call):
    """Answers a body with one JSON object."""

    def __init__(self, gateway: Gateway, handle: Callable[[bytes, Scope], Awaitable[object]]) -> None:
        super().__init__(gateway)
        self._handle = handle

    async def _serve(self, body: bytes) -> None:
        await self._answer(msgspec.json.encode(await self._handle(body, self._scope)))


async def disconnected(receive: Receive) -> None:
    """Return once the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
