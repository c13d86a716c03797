# SPDX-License-Identifier: Apache-2.0
"""Errors in the shape that OpenAI's clients expect."""

from __future__ import annotations

import math

import msgspec

ACCEPTED_ENCODINGS = "gzip, deflate"
"""Values of Content-Encoding that request bodies may have, in the form of an Accept-Encoding header."""


class ApiError(Exception):
    """Error response in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    @property
    def error_type(self) -> str:
        """OpenAI's `type` of the error."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        """Return the error as JSON, for the body of a response or for an event in a stream."""
        error = {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_seconds is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after_seconds))).encode()))
        elif self.status == 429:  # a retry cannot succeed, but OpenAI's clients retry without this header
            headers.append((b"x-should-retry", b"false"))
        elif self.status == 415:
            headers.append((b"accept-encoding", ACCEPTED_ENCODINGS.encode()))
        return headers


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the 400 error of an invalid request; `param` names the field of the body."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after_seconds: float = 1.0, code: str = "no_engine") -> ApiError:
    """Return a 503 error; its Retry-After header is `retry_after_seconds`."""
    return ApiError(503, message, code=code, retry_after_seconds=retry_after_seconds)
