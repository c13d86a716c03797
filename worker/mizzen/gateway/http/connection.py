"""HTTP/1.1 connections with bounds that uvicorn has not: of heads, and of clients that take no answer.

They speak nothing but HTTP/1.1, whatever a client would rather, and tell a request that its client has left.
When the server ends they lose no request that is on its way.
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
"""Request line and headers of one request; also what comes in a row of a chunk's size, or of trailers."""
HEAD_TIMEOUT_SECONDS = 20.0
"""A connection that has begun no request, or not ended its head, for this long is closed."""
WRITE_STALL_SECONDS = 60.0
"""A connection whose client takes nothing of what waits for it for this long is cut off."""
IDLE_LINGER_SECONDS = 1.0
"""So long an idle connection is open yet when the server ends: a request may be on its way over it."""
RECHECK_SECONDS = 0.05
"""So soon an idle connection over which something has come is looked at again, once that was read."""
HEAD_TOO_LARGE = ApiError(
    431,
    f"the request's head is larger than {MAX_HEAD_BYTES} bytes: send fewer headers",
    code="head_too_large",
)
INVALID_HTTP = "the connection got what is no HTTP/1.1 request"

WRITER_KEY = "mizzen.output"
"""Where a request's scope holds its `Output`."""


class ConnectionWriter:
    """Writes more of a chunked response without waiting, past the layers of ASGI.

    A stream is thousands of small writes, each of which would otherwise go through as many coroutines as
    there are middlewares. What begins and what ends a response goes through ASGI.
    """

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def write(self, data: bytes) -> bool:
        """Write a chunk; False when that cannot be done now, and nothing was written."""
        cycle = self._cycle
        if not cycle.chunked_encoding or cycle.response_complete or self._flow.write_paused:
            return False
        if data and not cycle.disconnected:  # an empty chunk is the end of the response
            self._write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def abort(self) -> None:
        """End the connection at once."""
        self._cycle.transport.abort()


class BoundedProtocol(HttpToolsProtocol):
    """A connection whose requests' heads come whole, soon, and within a size, and whose answers are taken.

    To close a transport is to wait until all was taken, which a client that reads nothing never lets happen:
    it would keep the connection and the answer, however large that is.
    """

    linger_seconds = 0.0
    """As `LEAVING_SECONDS`."""
    _shutting_down = False
    """The server ends."""
    _head_bytes = 0
    """What came since the last of a body: of a head, or of what is around chunks."""
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _buffered_bytes = 0
    _active_cycle: RequestResponseCycle | None = None
    """The request that is being answered; `cycle` is the newest, which may be in line behind it."""

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting, and tell the request that is being answered; those in line never begin."""
        self._cancel_head_timer()
        self._cancel_stall_timer()
        self.pipeline.clear()
        if self._active_cycle is not None and not self._active_cycle.response_complete:
            self._active_cycle.disconnected = True
            self._active_cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came; refuse a head that grows too large, and trailers that do."""
        if self.transport.is_closing():
            return
        if (
            self._head_timer is None and self._idle
        ):  # after an answer: the time for keep-alive ends with the first byte
            self._start_head_timer()
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
        """Take a header of the head; trailers come this way too, and nobody wants them."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Let the request begin, unless its head is to be parsed again."""
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
        if len(self.pipeline) == 1:  # while nothing is read, nobody sees that the client leaves
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Take more of a body."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Expect the next head."""
        if self.parser.should_upgrade():
            return
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Write no more, and see that the client takes what waits."""
        super().pause_writing()
        self._start_stall_timer()

    def resume_writing(self) -> None:
        """Write again."""
        self._cancel_stall_timer()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Expect the next request, or close; an answer that nobody takes is not waited for."""
        super().on_response_complete()
        self._watch_final_flush()
        if self._shutting_down and self._idle:
            self._close_after_linger()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle."""
        if self._has_unread_data:
            self.timeout_keep_alive_task = self.loop.call_later(
                RECHECK_SECONDS, self.timeout_keep_alive_handler
            )
            return
        super().timeout_keep_alive_handler()
        self._watch_final_flush()

    def shutdown(self) -> None:
        """Answer what is under way or on its way; answers that begin from now on say that they are the last.

        To close an idle connection, or one behind an answer that did not say so, loses a request that its
        client has just sent (RFC 9112, 9.6); most clients send another within moments, and are told so.
        """
        self._shutting_down = True
        if self._idle:
            self._close_after_linger()
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False

    def stop_lingering(self) -> None:
        """Wait no longer for requests that may be on their way."""
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
        """Whether something has come that was not read yet.

        A process that was held up may run a timer before it reads what came meanwhile (libuv does), and to
        close the connection then would lose a request that its client has sent long ago.
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
        """Parse requests, and leave each wish for another protocol unheard, as RFC 9110 (7.8) lets a server.

        The parser takes all behind the head of such a request for the other protocol, its body too, and gives
        up. So the head goes through a parser once more, without the wish, and then what is behind it.

        Raises:
            httptools.HttpParserError: this is no HTTP, or asks for a tunnel, and nothing behind it is parsed.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as generation:
                data = data[generation.args[0] :]  # it counts from where this feed began, not the head
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":  # the parser would find the same again
            raise httptools.HttpParserError("a tunnel")
        first = b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())
        headers = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([first, *headers, b"", b""])

    def _watch_final_flush(self) -> None:
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._start_stall_timer()

    def _start_stall_timer(self) -> None:
        """Look in a while whether less waits for the client; nothing is written meanwhile."""
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
        """Answer what came with an error, unless there is an answer, and close the connection."""
        self._cancel_head_timer()
        unanswered = self._idle
        if not self._in_head:  # the rest of a body that is waited for
            waiting = self.cycle is self._active_cycle and not self.cycle.response_started
            unanswered = waiting and error is not HEAD_TOO_LARGE
        if unanswered:  # no request gets two answers, and none is mixed with another
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
    """Connections over which requests come that must not be lost."""

    linger_seconds = IDLE_LINGER_SECONDS
