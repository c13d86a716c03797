# SPDX-License-Identifier: Apache-2.0
"""Request body of `POST /admin/verify`, which the operator sends before an engine may serve."""

from __future__ import annotations

from typing import Annotated

import msgspec

from mizzen.gateway.errors import invalid

MAX_VERIFY_SECONDS = 600.0


class VerifyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Golden prompt for one engine."""

    service: str
    """Name of the InferenceService."""
    uid: str
    """UID of the engine's pod."""
    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=65536)]
    """Text to continue."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_VERIFY_SECONDS)]
    """Number of seconds within which the complete answer must arrive."""


def parse_verify_request(body: bytes) -> VerifyRequest:
    """Parse the body of a verify request.

    Raises:
        ApiError: 400 if the body is invalid; the message names the field.
    """
    try:
        return msgspec.json.decode(body, type=VerifyRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body must be a golden prompt: {error}", code="invalid_json") from None


def verify_timeout(body: bytes) -> float:
    """Return how many seconds the answer to a verify request's body may take; 0 if the body is invalid."""
    try:
        return msgspec.json.decode(body, type=VerifyRequest).timeout_seconds
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0.0
