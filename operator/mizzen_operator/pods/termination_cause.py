"""Classification of engine failures, from the container's termination message or else the kubelet's reason.

The per-service metrics count failures by these causes. A cause is a metric label: the set is fixed. The
prefixes are written by the engine's supervisor, which shares no code with the operator; a test compares them.
"""

from __future__ import annotations

from mizzen_operator.api import reasons

MESSAGE_PREFIXES = frozenset(
    {
        "device_lost",
        "group_failed",
        "leader_lost",
        "node_lost",
        "rank_died",
        "rank_failed",
        "refused",
        "signal",
        "startup_timeout",
        "watchdog",
    }
)
"""Words that begin a termination message, before its colon; docs/operations.md explains each."""
CONFIGURATION_PREFIXES = ("wrong configuration", "cannot start")
CAUSES = (*sorted(MESSAGE_PREFIXES), "configuration", "out_of_memory", "other")
"""Values of the label `cause`."""


def classify_termination(reason: str, message: str) -> str:
    """Return the one of `CAUSES` that a termination belongs to.

    Args:
        reason: the kubelet's reason, such as `Error`.
        message: the container's termination message, or else the kubelet's message.
    """
    prefix = message.partition(":")[0]
    if prefix in MESSAGE_PREFIXES:
        return prefix
    if message.startswith(CONFIGURATION_PREFIXES):
        return "configuration"
    out_of_memory = reason == reasons.OOM_KILLED or message.startswith(reasons.OOM_KILLED)
    return "out_of_memory" if out_of_memory else "other"
