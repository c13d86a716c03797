"""How long a request may take, as it or its gateway says."""

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
    """Ends the block at a request's deadline; an asynchronous context manager.

    The header x-request-timeout sets it, or the body's `timeout` (`bound`), the shorter one of both;
    `--max-request-timeout-seconds` bounds them. `--request-timeout-seconds` is for requests that say nothing.
    """

    def __init__(self, config: GatewayConfig, scope: Scope, began: float) -> None:
        self._config = config
        self._scope = scope
        self._began = began
        self._seconds = 0.0
        self._set_by_client = False
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> RequestDeadline:
        """Begin.

        Raises:
            ApiError: 400 for a header that is no time.
        """
        asked = header_timeout(self._scope)
        await self._timeout.__aenter__()
        if asked is None and self._config.request_timeout_seconds:
            self._set(min(self._config.request_timeout_seconds, self._config.max_request_timeout_seconds))
        self.shorten(asked)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End.

        Raises:
            ApiError: 504 when the time was over.
        """
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            text = f"the request did not end within its timeout of {self._seconds:g} s"
            raise ApiError(504, text, code="timeout") from None

    def shorten(self, seconds: float | None) -> None:
        """Let the request take so long at most, counted from its arrival; None changes nothing."""
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
    """Return what a request's header x-request-timeout asks for, such as 30, 1.5s or 500ms.

    Raises:
        ApiError: 400 for something else.
    """
    given = dict(scope["headers"]).get(TIMEOUT_HEADER)
    if given is None:
        return None
    found = re.fullmatch(rb"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s)?\s*", given)
    seconds = float(found[1]) / (1000 if found[2] == b"ms" else 1) if found else 0.0
    if seconds <= 0:
        text = "the header x-request-timeout must be a time above 0, such as 30, 1.5s or 500ms"
        raise invalid(text, "x-request-timeout", "invalid_value")
    return seconds
