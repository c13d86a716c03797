"""How an engine ends."""

from __future__ import annotations

from dataclasses import dataclass

CONFIGURATION_EXIT_CODE = 2
"""Exit code of a rank, and of an engine, whose configuration cannot work: no restart helps."""
MISCONFIGURED = "wrong configuration"
"""Kind of such an end, and what its words begin with: the operator knows it by them."""


@dataclass(frozen=True, slots=True)
class ExitReason:
    """How the engine ended."""

    code: int
    kind: str = ""
    """Empty for a clean end, or one of

    device_lost, rank_died, rank_failed, watchdog, startup_timeout, signal, `MISCONFIGURED`; of a group of
    several nodes also node_lost (node 0 tells), leader_lost, group_failed and refused (the others tell).
    """
    reason: str = ""
