"""Reason and exit code of an engine's exit, as the supervisor reports them."""

from __future__ import annotations

from dataclasses import dataclass

CONFIGURATION_EXIT_CODE = 2
"""Exit code of a rank or an engine with an invalid configuration: a restart does not help."""
MISCONFIGURED = "wrong configuration"
"""Kind of an exit with `CONFIGURATION_EXIT_CODE`, and prefix of its message, by which the operator recognizes
it."""


@dataclass(frozen=True, slots=True)
class ExitReason:
    """Reason and exit code of an engine's exit."""

    code: int
    kind: str = ""
    """Kind of failure; empty for a clean exit.

    One of device_lost, rank_died, rank_failed, watchdog, startup_timeout, signal, `MISCONFIGURED`; in a group
    of several nodes also node_lost (on node 0), leader_lost, group_failed and refused (on the other nodes).
    """
    reason: str = ""
