# SPDX-License-Identifier: Apache-2.0
"""Classifies engine failures by the container's termination message, or else by the kubelet's reason.

The per-service metrics count failures by cause. A cause is the value of a metric label, so the set is fixed.
The engine's supervisor begins its messages with fixed prefixes. It shares no code with the operator, so a
test compares the two lists of prefixes.
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
"""Words with which the engine begins a termination message, before a colon; see docs/operations.md."""
CONFIGURATION_PREFIXES = ("wrong configuration", "cannot start")
CAUSES = (*sorted(MESSAGE_PREFIXES), "configuration", "out_of_memory", "other")
"""Values of the label `cause`."""


def classify_termination(reason: str, message: str) -> str:
    """Return the cause of a termination, one of `CAUSES`.

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
