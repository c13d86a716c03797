# SPDX-License-Identifier: Apache-2.0
"""Status codes of gRPC for errors of the HTTP API."""

from __future__ import annotations

import grpc
import msgspec

from mizzen.gateway.grpc.in_process_request import ResponseStart

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""Codes by status; all others are `INTERNAL`."""
STREAM_CODES = {
    "timeout": grpc.StatusCode.DEADLINE_EXCEEDED,
    "internal_error": grpc.StatusCode.INTERNAL,
    "invalid_request_error": grpc.StatusCode.INVALID_ARGUMENT,
    "rate_limit_error": grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Codes by an error's code or type; all others are `UNAVAILABLE`, so that clients try again."""
PASSED_HEADERS = (b"retry-after", b"x-request-id")
"""Headers of a response that are returned as trailing metadata."""


class CallError(Exception):
    """A call failed; the gRPC status consists of the code and the text."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def read_error(start: ResponseStart, body: bytes) -> CallError:
    """Return the error in a response of the HTTP API that has no success status."""
    return CallError(CODES.get(start.status, grpc.StatusCode.INTERNAL), read_message(body))


def read_stream_error(error: object) -> CallError:
    """Return the error in an event of a stream, whose status has been sent before."""
    fields = error if isinstance(error, dict) else {}
    named = (str(fields.get(name)) for name in ("code", "type"))
    code = next((STREAM_CODES[name] for name in named if name in STREAM_CODES), None)
    return CallError(code or grpc.StatusCode.UNAVAILABLE, error_text(error))


def read_message(body: bytes) -> str:
    """Return the message in the body of an error."""
    try:
        return error_text(msgspec.json.decode(body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace")[:1000]


def error_text(error: object) -> str:
    """Return the message of an error object of the HTTP API."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def trailing_metadata(start: ResponseStart) -> tuple[tuple[str, str], ...]:
    """Return the headers of a response that gRPC clients see."""
    return tuple((name.decode(), value.decode()) for name, value in start.headers if name in PASSED_HEADERS)
