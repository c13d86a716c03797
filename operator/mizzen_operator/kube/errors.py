# SPDX-License-Identifier: Apache-2.0
"""Errors of the API server, and which of them a retry cannot fix.

`client.py` raises KubeError, and the writers of children raise Refused. `rejection` turns both into the
reason that a status reports.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

from mizzen_operator.api import reasons

MAX_RETRY_DELAY_SECONDS = 5.0
"""Cap on the retry delay that a response requests; the back-off between reconciles is longer."""
REJECTION_CODES = (400, 403, 422)
"""Status codes by which the API server rejects a change for good."""
WEBHOOK_FAILURE_TEXT = "failed calling webhook"
"""Part of the API server's error message if an admission webhook gave no answer, or an invalid one."""
NAMESPACE_TERMINATING_TEXT = "because it is being terminated"
"""Part of the API server's error message if an object cannot be created in a namespace being deleted."""


class KubeError(Exception):
    """The API server rejected a request, or failed.

    Attributes:
        code: HTTP status; 0 if there was no response.
        reason: reason that the API server gave, such as `AlreadyExists`.
    """

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class Refused(Exception):
    """The cluster refuses something that a service needs, and a retry alone does not help.

    Attributes:
        reason: reason in CamelCase, for a condition.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class BlockingReason:
    """Reason why the operator cannot apply the spec of a service, with a message for the status."""

    reason: str
    message: str


def rejection(error: Refused | KubeError) -> BlockingReason | None:
    """Return why the cluster rejects a change; None if an unchanged retry may succeed."""
    if NAMESPACE_TERMINATING_TEXT in str(error):
        return namespace_terminating()
    if isinstance(error, Refused):
        return BlockingReason(error.reason, str(error))
    if WEBHOOK_FAILURE_TEXT in str(error):
        message = f"an admission webhook fails, and nothing is accepted without it: {error}"
        return BlockingReason(reasons.WEBHOOK_FAILED, message)
    if error.code in REJECTION_CODES or "denied the request" in str(error):
        return BlockingReason(reasons.REJECTED, f"the API server rejects a change: {error}")
    return None


def namespace_terminating() -> BlockingReason:
    """Return the reason why a service is blocked while its namespace is being deleted."""
    return BlockingReason(
        reasons.NAMESPACE_TERMINATING,
        "the namespace is being deleted, and the service with it: pods serve until they are deleted, and no "
        "new objects are created; the conditions of the namespace say what its deletion waits for",
    )


def describe_error(error: Exception) -> str:
    """Return an error's type and text on one line, truncated to 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def retry_delay(minimum: float, data: bytes) -> float:
    """Return the seconds to wait before a retry: `minimum` with jitter, or longer if the response says so.

    Args:
        minimum: delay in seconds, to which jitter is added.
        data: body of the response.
    """
    try:
        requested = float(msgspec.json.decode(data)["details"]["retryAfterSeconds"])
    except (ValueError, TypeError, KeyError):
        requested = 0.0
    return min(MAX_RETRY_DELAY_SECONDS, max(requested, minimum * random.uniform(0.8, 1.2)))


def is_webhook_failure(code: int, data: bytes) -> bool:
    """Return whether a response with this code and body reports a failed admission webhook."""
    return code == 500 and WEBHOOK_FAILURE_TEXT.encode() in data


def error_from_response(code: int, data: bytes, request: str) -> KubeError:
    """Build the error for a response.

    Args:
        code: HTTP status, 400 or more.
        data: body of the response.
        request: verb and path of the request, for the message.
    """
    try:
        status = msgspec.json.decode(data)
        return KubeError(code, status.get("reason", ""), status.get("message", "") or f"{request}: {code}")
    except (ValueError, AttributeError):
        return KubeError(code, "", f"{request}: {code}")
