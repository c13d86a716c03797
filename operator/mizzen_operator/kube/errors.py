"""What keeps the operator from its part, in words for a status."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

MAX_RETRY_DELAY_SECONDS = 5.0
"""However long the API server asks to be left alone; the look's own back-off is longer."""
REJECTION_CODES = (400, 403, 422)
"""Answers to a change by which the API server says that it will not take it as it is."""
WEBHOOK_FAILURE_TEXT = "failed calling webhook"
"""What the API server says of an admission webhook that did not answer, or answered what is no answer."""
NAMESPACE_TERMINATING_TEXT = "because it is being terminated"
"""What the API server says of a namespace in which nothing is made any more."""


class KubeError(Exception):
    """The API server refused or failed a request.

    Attributes:
        code: HTTP status; 0 when no answer came.
        reason: the API's reason, such as `AlreadyExists`.
    """

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class Refused(Exception):
    """The cluster does not let a service have what it needs, and trying again alone does not help.

    Attributes:
        reason: in CamelCase, for a condition.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class BlockingReason:
    """Why the operator could not do its part."""

    reason: str
    message: str


def rejection(error: Refused | KubeError) -> BlockingReason | None:
    """Why the cluster does not take a change; None when it may take it the next time, as it is."""
    if NAMESPACE_TERMINATING_TEXT in str(error):
        return namespace_terminating()
    if isinstance(error, Refused):
        return BlockingReason(error.reason, str(error))
    if WEBHOOK_FAILURE_TEXT in str(error):
        words = f"a webhook of the cluster fails, without which nothing is taken: {error}"
        return BlockingReason("WebhookFailed", words)
    if error.code in REJECTION_CODES or "denied the request" in str(error):
        return BlockingReason("Rejected", f"the API server rejects a change: {error}")
    return None


def namespace_terminating() -> BlockingReason:
    """The service's namespace is on its way out."""
    return BlockingReason(
        "NamespaceTerminating",
        "the namespace is being deleted, and the service with it: what runs serves until it goes, and "
        "nothing is made any more; the conditions of the namespace say what it waits for",
    )


def describe_error(error: Exception) -> str:
    """An error's kind and text, on one line and not too long."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def retry_delay(minimum: float, data: bytes) -> float:
    """Seconds until a request is sent again: what a refusal asks for, if that is more."""
    try:
        asked = float(msgspec.json.decode(data)["details"]["retryAfterSeconds"])
    except (ValueError, TypeError, KeyError):
        asked = 0.0
    return min(MAX_RETRY_DELAY_SECONDS, max(asked, minimum * random.uniform(0.8, 1.2)))


def is_webhook_failure(code: int, data: bytes) -> bool:
    """Whether an admission webhook failed that has to agree: somebody's program, not the API server."""
    return code == 500 and WEBHOOK_FAILURE_TEXT.encode() in data


def error_from_response(code: int, data: bytes, request: str) -> KubeError:
    """What the API server says of a request that it refused or failed; `request` was asked."""
    try:
        status = msgspec.json.decode(data)
        return KubeError(code, status.get("reason", ""), status.get("message", "") or f"{request}: {code}")
    except (ValueError, AttributeError):
        return KubeError(code, "", f"{request}: {code}")
