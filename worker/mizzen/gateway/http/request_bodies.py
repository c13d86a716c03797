# SPDX-License-Identifier: Apache-2.0
"""Read request bodies, with limits on the size and the arrival time of each, and on their total size.

The limits on the size apply to decompressed bodies, and to compressed ones as well.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import TracebackType

from starlette.types import Receive, Scope

from mizzen.gateway.auth.authentication import get_tenant_name
from mizzen.gateway.errors import ApiError, unavailable
from mizzen.gateway.http.content_encoding import BodyDecompressor, new_decompressor

BODY_TIMEOUT_SECONDS = 60.0
"""Time in which a complete body must arrive."""
BODY_STALL_SECONDS = 15.0
"""Maximum time between the arrival of two parts of a body."""
BASE64_MARKS = (b";base64,", b'"data"')
"""Texts before the Base64 text of an image: in a `data:` URL, and as the name of a field."""
MAX_BASE64_TEXTS = 1024
"""Maximum number of Base64 texts of each kind that are searched in a body."""


class ClientGone(Exception):
    """The client has closed the connection, or does not read its response."""


class BodyBudget:
    """Limit on the total size of the bodies of all requests in progress.

    A tenant may use at most half of it, or `largest` bytes if that is more.
    """

    def __init__(
        self, limit: int, largest: int = 0, freed: Callable[[int], None] = lambda size: None
    ) -> None:
        """Create a budget that is not used yet.

        Args:
            limit: maximum size of all bodies together, in bytes.
            largest: size in bytes that one tenant may use even if it is more than half of `limit`.
            freed: called with the size in bytes of each body that is released.
        """
        self._limit = limit
        self._freed = freed
        self._tenant_limit = max(limit // 2, largest)
        self._tenant_bytes: Counter[str] = Counter()
        self.used = 0

    def reserve(self, size: int, tenant: str = "") -> None:
        """Count `size` bytes against the budget and against a tenant's share of it.

        An empty `tenant` is not limited to a share.

        Raises:
            ApiError: 429 if the tenant would exceed its share, 503 if the budget would be exceeded.
        """
        if tenant and self._tenant_bytes[tenant] + size > self._tenant_limit:
            used = self._tenant_bytes[tenant]
            text = f"requests in progress of the key {tenant} hold {used} bytes of at most"
            text = f"{text} {self._tenant_limit} (half of --max-bodies-bytes)"
            raise ApiError(429, text, code="bodies_too_large", retry_after_seconds=1.0)
        if self.used + size > self._limit:
            text = f"requests in progress hold {self.used} bytes of at most {self._limit}"
            raise unavailable(f"{text} (--max-bodies-bytes)", code="bodies_too_large")
        self.used += size
        self._tenant_bytes[tenant] += size

    def release(self, size: int, tenant: str = "") -> None:
        """Stop counting `size` bytes, because their request has ended."""
        self.used -= size
        self._tenant_bytes[tenant] -= size
        if not self._tenant_bytes[tenant]:
            del self._tenant_bytes[tenant]
        self._freed(size)


class HeldBytes:
    """Bytes of one request that count against the budget of all bodies."""

    def __init__(self, budget: BodyBudget, tenant: str = "") -> None:
        self._budget = budget
        self._size = 0
        self.tenant = tenant
        """Name of the API key, as in `BodyBudget.reserve`; may change while no bytes are counted."""

    def add(self, size: int) -> None:
        """Count more bytes.

        Raises:
            ApiError: 429 or 503 if the limit is exceeded (see `BodyBudget.reserve`).
        """
        self._budget.reserve(size, self.tenant)
        self._size += size

    def release(self) -> None:
        """Stop counting the bytes."""
        self._budget.release(self._size, self.tenant)
        self._size = 0


class RequestBody:
    """Context manager that reads one body; the body counts against the budget until the block ends."""

    def __init__(self, budget: BodyBudget, limit: int, image_limit: Callable[[], int] = lambda: 0) -> None:
        """Create a reader.

        Args:
            budget: budget of all bodies.
            limit: maximum size of a body in bytes, without the Base64 text of images.
            image_limit: returns the maximum size of a body with images; called for bodies above `limit`.
        """
        self._held = HeldBytes(budget)
        self._limit = self._text_limit = limit
        self._image_limit = image_limit
        self._received = 0

    def __enter__(self) -> RequestBody:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.release()

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Return the complete body of a request, decompressed if it has a Content-Encoding.

        Raises:
            ApiError: 413 if the body is too long, 408 if it does not arrive in time, 415 if its encoding is
                not supported, 400 if it is not valid compressed data, 429 or 503 if the budget is exceeded
                (see `BodyBudget.reserve`).
            ClientGone: the client closed the connection.
        """
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit():
            self._check_size(int(announced))
        decompressor = new_decompressor(scope["headers"])
        self._held.tenant = get_tenant_name(scope)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                while await self._read_part(receive, body, decompressor):
                    pass
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_SECONDS:g} s") from None
        if len(body) > self._text_limit and len(body) - base64_size(body) > self._text_limit:
            raise body_too_large(self._text_limit)
        return bytes(body)

    async def _read_part(
        self, receive: Receive, body: bytearray, decompressor: BodyDecompressor | None
    ) -> bool:
        """Receive the next part and append its data to `body`; return whether more parts follow."""
        try:
            async with asyncio.timeout(BODY_STALL_SECONDS):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, f"nothing more of the body arrived for {BODY_STALL_SECONDS:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientGone("the client closed the connection while it sent its request")
        part = message.get("body", b"")
        more = bool(message.get("more_body"))
        if decompressor is None:
            self._append(body, part)
            return more
        self._received += len(part)
        self._check_size(self._received)
        for data in decompressor.decompress(part):
            self._append(body, data)
            await asyncio.sleep(0)  # a small part may decompress to the largest body
        if not more:
            decompressor.finish()
        return more

    def _append(self, body: bytearray, data: bytes) -> None:
        self._check_size(len(body) + len(data))
        self._held.add(len(data))
        body += data

    def _check_size(self, size: int) -> None:
        """Check the size of the body.

        Raises:
            ApiError: 413 if the body is too long, even if it has images.
        """
        if size > self._limit:
            self._limit = max(self._limit, self._image_limit())
        if size > self._limit:
            raise body_too_large(self._limit)


def base64_size(body: bytes | bytearray) -> int:
    """Return the number of bytes of JSON text that are Base64 of images: in `data:` URLs, or as `data`."""
    total = 0
    for mark in BASE64_MARKS:
        end = 0
        for _ in range(MAX_BASE64_TEXTS):
            begin = body.find(mark, end)
            if begin < 0:
                break
            begin = body.find(b'"', begin + len(mark)) + 1 if mark.endswith(b'"') else begin + len(mark)
            end = body.find(b'"', begin)
            if begin <= 0 or end < 0:
                break
            total += end - begin
    return total


def body_too_large(limit: int) -> ApiError:
    """Return the 413 error for a body that is longer than `limit` bytes."""
    return ApiError(413, f"the body is longer than {limit} bytes (--max-body-bytes)", code="body_too_large")
