# SPDX-License-Identifier: Apache-2.0
"""Requests to the HTTP API's ASGI application from within the process.

The gRPC API runs its calls as such requests, so that authentication, admission, deadlines, metrics, access
log and traces are those of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from starlette.types import ASGIApp, Message

log = logging.getLogger(__name__)

QUEUED_MESSAGES = 16
"""Maximum number of messages of a response that wait to be read."""
CLOSE_SECONDS = 5.0
"""Time in which the application ends a request whose caller has gone, before it is cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseStart:
    """Status and headers of a response; names of headers are in lower case."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]


class InProcessRequest:
    """Asynchronous context manager of one request; leaving it disconnects the caller."""

    def __init__(
        self, app: ASGIApp, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes = b""
    ) -> None:
        self._app = app
        self._body = body
        self._gone = asyncio.Event()
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(QUEUED_MESSAGES)
        self._task: asyncio.Task[None] | None = None
        self._body_read = False
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "2",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [*headers, (b"content-length", str(len(body)).encode())],
            "client": None,
            "server": None,
        }

    async def __aenter__(self) -> InProcessRequest:
        self._task = asyncio.create_task(self._run(), name="gRPC request")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()
        if self._task is None:
            return
        while not self._messages.empty():  # a blocked `_send` goes on
            self._messages.get_nowait()
        await asyncio.wait((self._task,), timeout=CLOSE_SECONDS)
        self._task.cancel()
        (failure,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(failure, Exception):
            log.error("a request failed", exc_info=failure)

    @property
    def disconnected(self) -> bool:
        """Whether `disconnect` was called, or the block was left."""
        return self._gone.is_set()

    def disconnect(self) -> None:
        """Tell the application that the caller has gone: it ends the request, and then the response."""
        self._gone.set()

    async def read_start(self) -> ResponseStart:
        """Return the status and the headers of the response.

        Raises:
            RuntimeError: the application ended without a response.
        """
        message = await self._messages.get()
        if message is None:
            raise RuntimeError("the request ended without a response")
        return ResponseStart(status=message["status"], headers=message.get("headers", ()))

    async def iterate_body(self) -> AsyncIterator[bytes]:
        """Yield the parts of the response's body."""
        while (message := await self._messages.get()) is not None:
            if message.get("body"):
                yield message["body"]

    async def read_body(self) -> bytes:
        """Return the body of the response."""
        return b"".join([part async for part in self.iterate_body()])

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            if self._gone.is_set():
                while not self._messages.empty():
                    self._messages.get_nowait()
            await self._messages.put(None)

    async def _receive(self) -> Message:
        if not self._body_read:
            self._body_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.is_set():
            return
        await self._messages.put(message)
