# SPDX-License-Identifier: Apache-2.0
"""Error responses that bypass the ASGI application, and unchunked responses for HTTP/1.0 clients.

`connection` uses both. Input that is not a valid request never reaches the application.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from mizzen.gateway.errors import ApiError

UNKNOWN_LENGTH = 1 << 62


def raw_response(error: ApiError) -> bytes:
    """Return the bytes of a complete error response, which announces that the connection closes."""
    body = error.body()
    lines = [b"HTTP/1.1 %d %b" % (error.status, HTTPStatus(error.status).phrase.encode())]
    lines += [b"%b: %b" % header for header in error.headers()]
    lines += [b"content-length: %d" % len(body), b"connection: close", b"", body]
    return b"\r\n".join(lines)


def unchunked_send(cycle: RequestResponseCycle) -> Callable[[Message], Awaitable[None]]:
    """Return a `send` function that ends a response of unknown length by closing the connection.

    HTTP/1.0 clients do not know chunked encoding (RFC 9112, 6.1), but uvicorn would use it nevertheless.
    """
    send: Send = cycle.send  # pyright: ignore[reportAssignmentType]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                cycle.chunked_encoding, cycle.expected_content_length = False, UNKNOWN_LENGTH
        elif cycle.expected_content_length >= UNKNOWN_LENGTH // 2 and not message.get("more_body"):
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return sending
