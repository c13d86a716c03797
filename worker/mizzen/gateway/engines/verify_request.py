"""What the operator asks an engine before it may serve: the body of `POST /admin/verify`, read."""

from __future__ import annotations

from typing import Annotated

import msgspec

from mizzen.gateway.errors import invalid

MAX_VERIFY_SECONDS = 600.0


class VerifyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One golden prompt for one engine."""

    service: str
    """Name of the InferenceService."""
    uid: str
    """Of the engine's pod."""
    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=65536)]
    """Text that the model continues."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_VERIFY_SECONDS)]
    """For the whole answer."""


def parse_verify_request(body: bytes) -> VerifyRequest:
    """Read a body.

    Raises:
        ApiError: 400, which names the field.
    """
    try:
        return msgspec.json.decode(body, type=VerifyRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body must be a golden prompt: {error}", code="invalid_json") from None


def verify_timeout(body: bytes) -> float:
    """Return how many seconds the answer to a body may take; 0 for what is no question."""
    try:
        return msgspec.json.decode(body, type=VerifyRequest).timeout_seconds
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0.0
