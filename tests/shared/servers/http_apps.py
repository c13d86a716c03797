# SPDX-License-Identifier: Apache-2.0
"""ASGI apps for tests of HTTP connections."""

from __future__ import annotations

import asyncio
from typing import Any


class Echoing:
    """App that answers with the path and the body of a request."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []

    @property
    def paths(self) -> list[str]:
        return [scope["path"] for scope in self.scopes]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        await answer(send, 200, scope["path"].encode() + b" " + body)


class Refusing(Echoing):
    """App that answers 401 and reads no body."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        await answer(send, 401, b"")


async def answer(send: Any, status: int, body: bytes) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


class Waiting(Echoing):
    """App that reads a body and then waits until the client disconnects."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.append(scope["path"])


class Slow(Echoing):
    """App that sends the head of its responses at once, and completes them when the test sets `end`."""

    def __init__(self) -> None:
        super().__init__()
        self.end = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"be", "more_body": True})
        await self.end.wait()
        await send({"type": "http.response.body", "body": b"gin"[1:]})
