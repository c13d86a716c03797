"""What keeps the operator from its part, in words for a status."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

MOST_PAUSE_SECONDS = 5.0
"""However long the API server asks to be left alone; the look's own back-off is longer."""
REJECTED = (400, 403, 422)
"""Answers to a change by which the API server says that it will not take it as it is."""
WEBHOOK_FAILS = "failed calling webhook"
"""What the API server says of an admission webhook that did not answer, or answered what is no answer."""
TERMINATING = "because it is being terminated"
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
class Failure:
    """Why the operator could not do its part."""

    reason: str
    message: str


def rejection(error: Refused | KubeError) -> Failure | None:
    """Why the cluster does not take a change; None when it may take it the next time, as it is."""
    if TERMINATING in str(error):
        return namespace_terminating()
    if isinstance(error, Refused):
        return Failure(error.reason, str(error))
    if WEBHOOK_FAILS in str(error):
        words = f"a webhook of the cluster fails, without which nothing is taken: {error}"
        return Failure("WebhookFailed", words)
    if error.code in REJECTED or "denied the request" in str(error):
        return Failure("Rejected", f"the API server rejects a change: {error}")
    return None


def namespace_terminating() -> Failure:
    """The service's namespace is on its way out."""
    return Failure(
        "NamespaceTerminating",
        "the namespace is being deleted, and the service with it: what runs serves until it goes, and "
        "nothing is made any more; the conditions of the namespace say what it waits for",
    )


def brief(error: Exception) -> str:
    """An error's kind and text, on one line and not too long."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def pause(least: float, data: bytes) -> float:
    """Seconds until a request is sent again: what a refusal asks for, if that is more."""
    try:
        asked = float(msgspec.json.decode(data)["details"]["retryAfterSeconds"])
    except (ValueError, TypeError, KeyError):
        asked = 0.0
    return min(MOST_PAUSE_SECONDS, max(asked, least * random.uniform(0.8, 1.2)))


def by_webhook(code: int, data: bytes) -> bool:
    """Whether an admission webhook failed that has to agree: somebody's program, not the API server."""
    return code == 500 and WEBHOOK_FAILS.encode() in data


def refusal(code: int, data: bytes, what: str) -> KubeError:
    """What the API server says of a request that it refused or failed; `what` was asked."""
    try:
        status = msgspec.json.decode(data)
        return KubeError(code, status.get("reason", ""), status.get("message", "") or f"{what}: {code}")
    except (ValueError, AttributeError):
        return KubeError(code, "", f"{what}: {code}")
