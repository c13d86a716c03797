# SPDX-License-Identifier: Apache-2.0
"""Measure gaps in which the monitoring process itself did not run.

While a container is paused or a machine stalls, neither the monitor nor the ranks run. The supervisor and the
stall detector exclude such gaps from the ranks' deadlines.
"""

from __future__ import annotations

NORMAL_CHECK_SECONDS = 1.0
"""Maximum time in seconds between two checks while the monitor runs; any time beyond it counts as a gap."""


class ClockGapMeter:
    """Measures the gaps in which a monitor did not run, from the times of its checks."""

    def __init__(self) -> None:
        self._checked_at: float | None = None

    def measure(self, now: float) -> float:
        """Record a check at `now`; return the length in seconds of the gap before it, or 0."""
        previous, self._checked_at = self._checked_at, now
        return max(0.0, now - previous - NORMAL_CHECK_SECONDS) if previous is not None else 0.0
