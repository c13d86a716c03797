"""Why an engine ended badly, as one word: its own where it left one, else the node's."""

from __future__ import annotations

KINDS = frozenset(
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
"""What a termination message begins with, ahead of a colon; docs/operations.md says what each means."""
CONFIGURATION = ("wrong configuration", "cannot start")
OUT_OF_MEMORY = "OOMKilled"
CAUSES = (*sorted(KINDS), "configuration", "out_of_memory", "other")


def cause_of(reason: str, message: str) -> str:
    """Return which of `CAUSES` it was.

    Args:
        reason: The node's word for how the container ended, such as `Error`.
        message: The container's termination message, or the node's.
    """
    kind = message.partition(":")[0]
    if kind in KINDS:
        return kind
    if message.startswith(CONFIGURATION):
        return "configuration"
    return "out_of_memory" if reason == OUT_OF_MEMORY or message.startswith(OUT_OF_MEMORY) else "other"
