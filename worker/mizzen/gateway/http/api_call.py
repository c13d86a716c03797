# SPDX-License-Identifier: Apache-2.0
"""Base class of the responses that endpoints return.

Each response handles one API call, from reading the request's body to sending the last byte.

If the client disconnects, the call is cancelled, and its request is aborted in the engine.
"""

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

from mizzen.gateway.error_shapes import shape_error
from mizzen.gateway.errors import ApiError
from mizzen.gateway.fields.ignored import IGNORED_HEADER, ignored_header
from mizzen.gateway.http.connection import WRITER_KEY, ConnectionWriter
from mizzen.gateway.http.deadlines import RequestDeadline
from mizzen.gateway.http.request_bodies import ClientGone, RequestBody
from mizzen.gateway.images.limits import ImagePartError
from mizzen.gateway.telemetry.request_record import get_record

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

log = logging.getLogger(__name__)

SEND_TIMEOUT_SECONDS = 60.0
"""Time after which a client that reads nothing of a response is disconnected."""


class ApiCall(Response):
    """Response that reads a request's body, within limits, and serves the request.

    If the client disconnects, serving is cancelled. Errors have the shape of the request's API.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._began = time.monotonic()
        self._started = False
        self.background = None

    @abstractmethod
    async def _serve(self, body: bytes) -> None:
        """Answer the request whose body is `body`.

        Raises:
            ApiError: the request cannot be served; the error is sent to the client.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request as an ASGI application. If the client disconnects, cancel `_serve`."""
        self._scope, self._send = scope, send
        self._output: ConnectionWriter | None = scope.get(WRITER_KEY)
        try:
            try:
                async with RequestDeadline(self._gateway.config, scope, self._began) as self._deadline:
                    await self._read_and_serve(scope, receive)
            except ApiError as error:
                await self._send_error(error)
        except ClientGone as error:
            get_record(scope).error = "client_gone"
            self._gateway.metrics.aborts.labels("client").inc()
            log.debug("client disconnected", extra={"fields": {"reason": str(error)}})

    async def _read_and_serve(self, scope: Scope, receive: Receive) -> None:
        gateway = self._gateway
        with RequestBody(gateway.body_budget, gateway.config.max_body_bytes, gateway.body_limit) as body:
            serve_task = asyncio.create_task(self._serve(await body.read(scope, receive)))
            disconnect_task = asyncio.create_task(wait_disconnected(receive))
            try:
                await asyncio.wait((serve_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
                if not serve_task.done():
                    raise ClientGone("the client closed the connection")
                await serve_task
            finally:
                for task in (serve_task, disconnect_task):
                    task.cancel()
                await asyncio.gather(serve_task, disconnect_task, return_exceptions=True)
                # a task's exception refers to this frame, so these references would form a garbage cycle
                del serve_task, disconnect_task

    async def _send_json(self, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """Send a complete JSON response."""
        await self._start_response(200, [(b"content-type", b"application/json"), *(headers or ())], len(body))
        await self._write(body, more=False)

    async def _start_response(
        self, status: int, headers: list[tuple[bytes, bytes]], length: int | None = None
    ) -> None:
        ignored = get_record(self._scope).ignored_fields
        if ignored:
            headers = [*headers, (IGNORED_HEADER, ignored_header(ignored))]
        if length is not None:
            headers = [*headers, (b"content-length", str(length).encode())]
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _try_write(self, data: bytes) -> bool:
        """Write a part of a stream if that is possible without waiting; return whether it was written."""
        return self._output is not None and self._output.write(data)

    def _abort_connection(self) -> None:
        """Close the connection at once and discard unsent data."""
        if self._output is not None:
            self._output.abort()

    async def _write(self, data: bytes, more: bool = True) -> None:
        """Send a part of the response body.

        Raises:
            ClientGone: the client read nothing for `SEND_TIMEOUT_SECONDS`.
        """
        try:
            async with asyncio.timeout(SEND_TIMEOUT_SECONDS):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except (TimeoutError, OSError) as error:
            raise ClientGone(f"the client read nothing for {SEND_TIMEOUT_SECONDS:g} s") from error

    async def _send_error(self, error: ApiError) -> None:
        """Send an error response, or the final error event if a stream has started."""
        get_record(self._scope).error = error.code or error.error_type
        if isinstance(error, ImagePartError):
            self._gateway.metrics.images_refused.labels(error.code).inc()
        if self._started:
            await self._write(self._stream_failure(error), more=False)
            return
        status, body = shape_error(error, self._scope)
        await self._start_response(status, error.headers(), len(body))
        await self._write(body, more=False)

    def _stream_failure(self, error: ApiError) -> bytes:
        """Return the event that ends a failed stream. No [DONE] follows it."""
        return b"data: " + error.body() + b"\n\n"


class JsonCall(ApiCall):
    """Response that is one JSON object; `handle` returns the object for the request's body and scope."""

    def __init__(self, gateway: Gateway, handle: Callable[[bytes, Scope], Awaitable[object]]) -> None:
        super().__init__(gateway)
        self._handle = handle

    async def _serve(self, body: bytes) -> None:
        await self._send_json(msgspec.json.encode(await self._handle(body, self._scope)))


async def wait_disconnected(receive: Receive) -> None:
    """Wait until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
