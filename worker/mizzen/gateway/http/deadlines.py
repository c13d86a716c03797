# SPDX-License-Identifier: Apache-2.0
"""Deadlines of requests, set by the client or by the gateway's options.

`api_call` runs each request inside a `RequestDeadline`.
"""

from __future__ import annotations

import asyncio
import re
import time
from types import TracebackType

from starlette.types import Scope

from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.errors import ApiError, invalid

TIMEOUT_HEADER = b"x-request-timeout"


class RequestDeadline:
    """Asynchronous context manager that cancels its block at a request's deadline.

    The client sets the timeout by the header x-request-timeout or by the body's `timeout` (see `shorten`); if
    it sets both, the shorter one applies. If it sets neither, `--request-timeout-seconds` applies. No timeout
    is longer than `--max-request-timeout-seconds`. Timeouts count from `began`, on the monotonic clock.
    """

    def __init__(self, config: GatewayConfig, scope: Scope, began: float) -> None:
        self._config = config
        self._scope = scope
        self._began = began
        self._seconds = 0.0
        self._set_by_client = False
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> RequestDeadline:
        """Start the timeout.

        Raises:
            ApiError: 400 if the header x-request-timeout is not a valid time.
        """
        requested = header_timeout(self._scope)
        await self._timeout.__aenter__()
        if requested is None and self._config.request_timeout_seconds:
            self._set(min(self._config.request_timeout_seconds, self._config.max_request_timeout_seconds))
        self.shorten(requested)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the timeout.

        Raises:
            ApiError: 504 if the deadline has passed.
        """
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            text = f"the request did not end within its timeout of {self._seconds:g} s"
            raise ApiError(504, text, code="timeout") from None

    def shorten(self, seconds: float | None) -> None:
        """Apply a timeout that the client has set, in seconds from the request's arrival; None has no effect.

        If the client sets two timeouts, the shorter one applies.
        """
        if seconds is None:
            return
        seconds = min(seconds, self._config.max_request_timeout_seconds)
        if not self._set_by_client or seconds < self._seconds:
            self._set_by_client = True
            self._set(seconds)

    def _set(self, seconds: float) -> None:
        self._seconds = seconds
        left = self._began + seconds - time.monotonic()
        self._timeout.reschedule(asyncio.get_running_loop().time() + max(0.0, left))


def header_timeout(scope: Scope) -> float | None:
    """Return the timeout in the header x-request-timeout, in seconds; None without the header.

    Valid values are, for example, 30, 1.5s and 500ms.

    Raises:
        ApiError: 400 if the header is not a valid time.
    """
    value = dict(scope["headers"]).get(TIMEOUT_HEADER)
    if value is None:
        return None
    match = re.fullmatch(rb"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s)?\s*", value)
    seconds = float(match[1]) / (1000 if match[2] == b"ms" else 1) if match else 0.0
    if seconds <= 0:
        text = "the header x-request-timeout must be a time above 0, such as 30, 1.5s or 500ms"
        raise invalid(text, "x-request-timeout", "invalid_value")
    return seconds
