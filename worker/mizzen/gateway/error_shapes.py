# SPDX-License-Identifier: Apache-2.0
"""Status code and JSON body of errors in the shape of the API that a request uses.

Errors of requests to `/v1/messages` have Anthropic's shape; all other errors have OpenAI's.
"""

from __future__ import annotations

import msgspec
from starlette.types import Scope

from mizzen.gateway.errors import ApiError
from mizzen.gateway.telemetry.request_record import get_record

MESSAGES_PATH = "/v1/messages"
OVERLOADED_STATUS = 529
"""Status code of Anthropic's API where other APIs have 503."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error type for each status code of an `ApiError`; other codes mean an invalid request."""


class MessagesErrorDetail(msgspec.Struct):
    """An error, in Anthropic's JSON shape."""

    type: str
    message: str


class MessagesErrorBody(msgspec.Struct):
    """Body of every error response of the Messages API, and data of the event that ends a failed stream."""

    error: MessagesErrorDetail
    request_id: str
    type: str = "error"


def uses_messages_api(scope: Scope) -> bool:
    """Return whether a request's path belongs to Anthropic's Messages API."""
    path = scope["path"]
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def messages_error_body(error: ApiError, scope: Scope) -> bytes:
    """Return an error as JSON in Anthropic's shape."""
    detail = MessagesErrorDetail(_TYPES.get(error.status, "invalid_request_error"), error.message)
    return msgspec.json.encode(MessagesErrorBody(detail, get_record(scope).request_id))


def shape_error(error: ApiError, scope: Scope) -> tuple[int, bytes]:
    """Return the status code and the body of the response for an error, as the request's API has them."""
    if not uses_messages_api(scope):
        return error.status, error.body()
    status = OVERLOADED_STATUS if error.status == 503 else error.status
    return status, messages_error_body(error, scope)


def request_id_headers(scope: Scope) -> tuple[bytes, ...]:
    """Return the names of the response headers that hold the request's id."""
    return (b"x-request-id", b"request-id") if uses_messages_api(scope) else (b"x-request-id",)
