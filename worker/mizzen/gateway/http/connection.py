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
from mizzen.gateway.http.raw_errors import unframed, whole_answer

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers of one request; also what comes in a row of a chunk's size, or of trailers."""
HEAD_SECONDS = 20.0
"""A connection that has begun no request, or not ended its head, for this long is closed."""
UNTAKEN_SECONDS = 60.0
"""A connection whose client takes nothing of what waits for it for this long is cut off."""
LEAVING_SECONDS = 1.0
"""So long an idle connection is open yet when the server ends: a request may be on its way over it."""
UNREAD_SECONDS = 0.05
"""So soon an idle connection over which something has come is looked at again, once that was read."""
TOO_LARGE = ApiError(
    431,
    f"the request's head is larger than {MAX_HEAD_BYTES} bytes: send fewer headers",
    code="head_too_large",
)
INVALID = "the connection got what is no HTTP/1.1 request"

OUTPUT = "mizzen.output"
"""Where a request's scope holds its `Output`."""


class Output:
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

    def cut(self) -> None:
        """End the connection at once."""
        self._cycle.transport.abort()


class BoundedProtocol(HttpToolsProtocol):
    """A connection whose requests' heads come whole, soon, and within a size, and whose answers are taken.

    To close a transport is to wait until all was taken, which a client that reads nothing never lets happen:
    it would keep the connection and the answer, however large that is.
    """

    leaving_seconds = 0.0
    """As `LEAVING_SECONDS`."""
    _leaves = False
    """The server ends."""
    _bare_bytes = 0
    """What came since the last of a body: of a head, or of what is around chunks."""
    _in_head = True
    _deadline: asyncio.TimerHandle | None = None
    _taking: asyncio.TimerHandle | None = None
    _untaken = 0
    _running: RequestResponseCycle | None = None
    """The request that is being answered; `cycle` is the newest, which may be in line behind it."""

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting, and tell the request that is being answered; those in line never begin."""
        self._head_is_here()
        self._is_taken()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came; refuse a head that grows too large, and trailers that do."""
        if self.transport.is_closing():
            return
        if (
            self._deadline is None and self._idle
        ):  # after an answer: the time for keep-alive ends with the first byte
            self._await_head()
        self._bare_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError as error:
            text = f"{INVALID}: {error}"
            self.logger.warning(text)
            self._refuse(ApiError(400, text, code="invalid_http"))
            return
        if self._bare_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(TOO_LARGE)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header of the head; trailers come this way too, and nobody wants them."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Let the request begin, unless its head is to be parsed again."""
        if self.parser.should_upgrade():
            return
        self._in_head, self._bare_bytes = False, 0
        self._head_is_here()
        super().on_headers_complete()
        self.cycle.scope[OUTPUT] = Output(self.cycle)  # pyright: ignore[reportGeneralTypeIssues]
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = unframed(self.cycle)  # pyright: ignore[reportAttributeAccessIssue]
        if self._leaves:
            self.cycle.keep_alive = False
        if len(self.pipeline) == 1:  # while nothing is read, nobody sees that the client leaves
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Take more of a body."""
        self._bare_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Expect the next head."""
        if self.parser.should_upgrade():
            return
        self._in_head, self._bare_bytes = True, 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Write no more, and see that the client takes what waits."""
        super().pause_writing()
        self._await_taking()

    def resume_writing(self) -> None:
        """Write again."""
        self._is_taken()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Expect the next request, or close; an answer that nobody takes is not waited for."""
        super().on_response_complete()
        self._closes()
        if self._leaves and self._idle:
            self._leave_soon()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle."""
        if self._unread:
            self.timeout_keep_alive_task = self.loop.call_later(
                UNREAD_SECONDS, self.timeout_keep_alive_handler
            )
            return
        super().timeout_keep_alive_handler()
        self._closes()

    def shutdown(self) -> None:
        """Answer what is under way or on its way; answers that begin from now on say that they are the last.

        To close an idle connection, or one behind an answer that did not say so, loses a request that its
        client has just sent (RFC 9112, 9.6); most clients send another within moments, and are told so.
        """
        self._leaves = True
        if self._idle:
            self._leave_soon()
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False

    def hurry(self) -> None:
        """Wait no longer for requests that may be on their way."""
        self.leaving_seconds = 0.0
        if self._idle:
            self._leave()

    def _leave_soon(self) -> None:
        if self.leaving_seconds:
            self.loop.call_later(self.leaving_seconds, self._leave)
        else:
            self._leave()

    def _leave(self) -> None:
        if not self._idle or (self._in_head and self._bare_bytes):
            return
        if self.leaving_seconds and self._unread:
            self.loop.call_later(UNREAD_SECONDS, self._leave)
            return
        self.transport.close()
        self._closes()

    @property
    def _unread(self) -> bool:
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
        self._running = cycle
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
            except httptools.HttpParserUpgrade as wish:
                data = data[wish.args[0] :]  # it counts from where this feed began, not the head
            head = self._head_without_wish()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self.parser.feed_data(head)

    def _head_without_wish(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":  # the parser would find the same again
            raise httptools.HttpParserError("a tunnel")
        first = b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())
        headers = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([first, *headers, b"", b""])

    def _closes(self) -> None:
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._await_taking()

    def _await_taking(self) -> None:
        """Look in a while whether less waits for the client; nothing is written meanwhile."""
        self._is_taken()
        self._untaken = self.transport.get_write_buffer_size()
        self._taking = self.loop.call_later(UNTAKEN_SECONDS, self._look_what_is_taken)

    def _look_what_is_taken(self) -> None:
        if self.transport.get_write_buffer_size() < self._untaken:
            self._await_taking()
        else:
            self._taking = None
            self.transport.abort()

    def _is_taken(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    def _refuse(self, error: ApiError) -> None:
        """Answer what came with an error, unless there is an answer, and close the connection."""
        self._head_is_here()
        unanswered = self._idle
        if not self._in_head:  # the rest of a body that is waited for
            waiting = self.cycle is self._running and not self.cycle.response_started
            unanswered = waiting and error is not TOO_LARGE
        if unanswered:  # no request gets two answers, and none is mixed with another
            self.transport.write(whole_answer(error))
        self.transport.close()
        self._closes()

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._late)

    def _head_is_here(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self._idle:
            self.transport.close()
            self._closes()


class PatientProtocol(BoundedProtocol):
    """Connections over which requests come that must not be lost."""

    leaving_seconds = LEAVING_SECONDS
