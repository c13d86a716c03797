"""What keeps the operator from its part, in words for a status."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen_operator.apply import Refused
from mizzen_operator.refs import WEBHOOK_FAILS, KubeError

REJECTED = (400, 403, 422)
"""Answers to a change by which the API server says that it will not take it as it is."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the operator could not do its part."""

    reason: str
    message: str


def rejection(error: Refused | KubeError) -> Failure | None:
    """Why the cluster does not take a change; None when it may take it the next time, as it is."""
    if isinstance(error, Refused):
        return Failure(error.reason, str(error))
    if WEBHOOK_FAILS in str(error):
        words = f"a webhook of the cluster fails, without which nothing is taken: {error}"
        return Failure("WebhookFailed", words)
    if error.code in REJECTED or "denied the request" in str(error):
        return Failure("Rejected", f"the API server rejects a change: {error}")
    return None
