"""What keeps the operator from its part, in words for a status."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen_operator.kube.apply import Refused
from mizzen_operator.kube.refs import WEBHOOK_FAILS, KubeError

REJECTED = (400, 403, 422)
"""Answers to a change by which the API server says that it will not take it as it is."""


TERMINATING = "because it is being terminated"
"""What the API server says of a namespace in which nothing is made any more."""


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
