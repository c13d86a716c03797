# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 connections with limits that uvicorn lacks: on request heads, and on clients that do not read.

Connections ignore upgrades to other protocols, and notify a request when its client disconnects. A shutdown
loses no request that is on its way. `main` passes the protocol classes to uvicorn.
"""

from __future__ import annotations

import asyncio
import select
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from mizzen.gateway.errors import ApiError
from mizzen.gateway.http.raw_errors import raw_response, unchunked_send

MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of a request head in bytes; also of a body's chunk framing, and of its trailers."""
HEAD_TIMEOUT_SECONDS = 20.0
"""Time after which a connection is closed if no complete head has arrived on it."""
WRITE_STALL_SECONDS = 60.0
"""Time after which a connection is aborted if its client reads nothing of the buffered output."""
IDLE_LINGER_SECONDS = 1.0
"""Time for which idle connections stay open at shutdown, because a request may be on its way."""
RECHECK_SECONDS = 0.05
"""Delay before an idle connection with unread input is checked again."""
HEAD_TOO_LARGE = ApiError(
    431,
    f"the request's head is larger than {MAX_HEAD_BYTES} bytes: send fewer headers",
    code="head_too_large",
)
INVALID_HTTP = "the connection received something other than an HTTP/1.1 request"

WRITER_KEY = "mizzen.output"
"""Key of a request's `ConnectionWriter` in its ASGI scope."""


class ConnectionWriter:
    """Writes chunks of a response directly to the connection, without waiting and without ASGI.

    A stream consists of thousands of small writes, and through ASGI each write would run a coroutine of every
    middleware. The beginning and the end of a response do go through ASGI.
    """

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def write(self, data: bytes) -> bool:
        """Write a chunk and return True; if that is not possible now, write nothing and return False."""
        cycle = self._cycle
        if not cycle.chunked_encoding or cycle.response_complete or self._flow.write_paused:
            return False
        if data and not cycle.disconnected:  # an empty chunk is the end of the response
            self._write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def abort(self) -> None:
        """Abort the connection at once."""
        self._cycle.transport.abort()


class BoundedProtocol(HttpToolsProtocol):
    """HTTP connection that limits request heads in size and time, and aborts if its client does not read.

    A transport closes only after the client has read everything. Without the abort, a client that never reads
    would keep the connection and its response, however large, in memory.
    """

    linger_seconds = 0.0
    """Time for which idle connections stay open at shutdown; 0 closes them at once."""
    _shutting_down = False
    """True if the server is shutting down."""
    _head_bytes = 0
    """Number of bytes of the current head, or of chunk framing since the last part of a body."""
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _buffered_bytes = 0
    _active_cycle: RequestResponseCycle | None = None
    """Request that is being answered. `cycle` is the newest request, which may wait in `pipeline`."""

    def connection_made(self, transport: Any) -> None:
        """Start the timer for the first request's head."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers, notify the request that is being answered, and drop pipelined requests."""
        self._cancel_head_timer()
        self._cancel_stall_timer()
        self.pipeline.clear()
        if self._active_cycle is not None and not self._active_cycle.response_complete:
            self._active_cycle.disconnected = True
            self._active_cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; reject malformed requests, and heads and trailers that are too large."""
        if self.transport.is_closing():
            return
        if self._head_timer is None and self._idle:
            self._start_head_timer()  # the first byte of a request ends the keep-alive timeout
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError as error:
            text = f"{INVALID_HTTP}: {error}"
            self.logger.warning(text)
            self._reject(ApiError(400, text, code="invalid_http"))
            return
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._reject(HEAD_TOO_LARGE)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; drop trailers, which the parser reports in the same way."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, but skip an upgrade request: `_parse` parses it again without the upgrade."""
        if self.parser.should_upgrade():
            return
        self._in_head, self._head_bytes = False, 0
        self._cancel_head_timer()
        super().on_headers_complete()
        self.cycle.scope[WRITER_KEY] = ConnectionWriter(self.cycle)  # pyright: ignore[reportGeneralTypeIssues]
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = unchunked_send(self.cycle)  # pyright: ignore[reportAttributeAccessIssue]
        if self._shutting_down:
            self.cycle.keep_alive = False
        if len(self.pipeline) == 1:  # a disconnect is only noticed while the connection is read
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Pass a part of a body to the request."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request's body, and expect the head of the next request."""
        if self.parser.should_upgrade():
            return
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Pause writing, and start the timer that aborts the connection if the client does not read."""
        super().pause_writing()
        self._start_stall_timer()

    def resume_writing(self) -> None:
        """Resume writing, and cancel the timer that `pause_writing` started."""
        self._cancel_stall_timer()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Expect the next request, or close the connection.

        A connection that is closing is aborted if the client does not read the remaining output.
        """
        super().on_response_complete()
        self._watch_final_flush()
        if self._shutting_down and self._idle:
            self._close_after_linger()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection after the keep-alive timeout; if it has unread input, check again later."""
        if self._has_unread_data:
            self.timeout_keep_alive_task = self.loop.call_later(
                RECHECK_SECONDS, self.timeout_keep_alive_handler
            )
            return
        super().timeout_keep_alive_handler()
        self._watch_final_flush()

    def shutdown(self) -> None:
        """Shut down without losing requests: all further responses announce `connection: close`.

        A client may just have sent another request. That request would be lost if an idle connection were
        closed at once, or if a connection were closed after a response that did not announce it (RFC 9112,
        9.6). Most clients send another request within moments, and its response announces the close. Other
        idle connections are closed after `linger_seconds`.
        """
        self._shutting_down = True
        if self._idle:
            self._close_after_linger()
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False

    def stop_lingering(self) -> None:
        """Stop lingering: close the connection now if it is idle, else right after its response."""
        self.linger_seconds = 0.0
        if self._idle:
            self._close_if_idle()

    def _close_after_linger(self) -> None:
        if self.linger_seconds:
            self.loop.call_later(self.linger_seconds, self._close_if_idle)
        else:
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self._idle or (self._in_head and self._head_bytes):
            return
        if self.linger_seconds and self._has_unread_data:
            self.loop.call_later(RECHECK_SECONDS, self._close_if_idle)
            return
        self.transport.close()
        self._watch_final_flush()

    @property
    def _has_unread_data(self) -> bool:
        """True if bytes have arrived that the event loop has not read yet.

        After a pause of the process, the event loop may run a timer before it reads bytes that have arrived
        meanwhile (libuv does). Closing the connection then would lose a request that was sent long ago.
        """
        if self.transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active_cycle = cycle
        super()._start_asgi_task(cycle, app)

    def _parse(self, data: memoryview) -> None:
        """Parse requests and ignore upgrades to other protocols, as RFC 9110 (7.8) allows.

        After the head of an upgrade request, the parser stops, because the rest, including the body, belongs
        to the other protocol. A new parser therefore gets that head without its upgrade header, followed by
        the remaining bytes.

        Raises:
            httptools.HttpParserError: the bytes are not HTTP, or they are a request for a tunnel; nothing
                after them is parsed.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]  # an offset in this feed, not in the head
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":  # the parser would stop at this head again
            raise httptools.HttpParserError("a tunnel")
        first = b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())
        headers = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([first, *headers, b"", b""])

    def _watch_final_flush(self) -> None:
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._start_stall_timer()

    def _start_stall_timer(self) -> None:
        """Abort the connection if its client reads nothing for `WRITE_STALL_SECONDS`.

        Nothing is written while the timer runs, so the buffered output shrinks only if the client reads.
        """
        self._cancel_stall_timer()
        self._buffered_bytes = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(WRITE_STALL_SECONDS, self._check_write_progress)

    def _check_write_progress(self) -> None:
        if self.transport.get_write_buffer_size() < self._buffered_bytes:
            self._start_stall_timer()
        else:
            self._stall_timer = None
            self.transport.abort()

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _reject(self, error: ApiError) -> None:
        """Send an error response, unless another response is in progress, and close the connection."""
        self._cancel_head_timer()
        unanswered = self._idle
        if not self._in_head:  # in the middle of a body
            waiting = self.cycle is self._active_cycle and not self.cycle.response_started
            unanswered = waiting and error is not HEAD_TOO_LARGE
        if unanswered:  # never send a second response, or an error in the middle of a response
            self.transport.write(raw_response(error))
        self.transport.close()
        self._watch_final_flush()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self._on_head_timeout)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self._idle:
            self.transport.close()
            self._watch_final_flush()


class LingeringProtocol(BoundedProtocol):
    """Connection that stays open for a while at shutdown, so that no request on its way is lost."""

    linger_seconds = IDLE_LINGER_SECONDS
