"""The phases of a rank on their way into the status block."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from mizzen.server.exit_reason import CONFIGURATION_EXIT_CODE
from mizzen.server.metric_catalogue import INDEX, STARTUP_PHASES, Phase
from mizzen.server.status_block import Snapshot, StatusWriter
from mizzen.wire.ranks.group_socket import CannotListen

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.1
"""How far a phase is need not be told more often."""


class PhaseStatus:
    """Shows which phase a rank is in and how far, and at the end why it failed."""

    def __init__(self, writer: StatusWriter) -> None:
        self._writer = writer
        self._values = writer.values
        self._phase = Phase.SPAWN
        self._failed_phase = Phase.SPAWN

    def enter_phase(self, phase: Phase) -> None:
        """Enter a phase; the time in a start-up phase is its metric, and is logged."""
        now, values = time.monotonic(), self._values
        if self._phase in STARTUP_PHASES:
            spent = INDEX[f"phase_seconds_{self._phase.name}"]
            values[spent] += now - values[INDEX["phase_since"]]
            if phase not in (self._phase, Phase.FAILED):
                fields = {"phase": self._phase.name.lower(), "seconds": round(values[spent], 3)}
                log.info("phase of the start is over", extra={"fields": fields})
        self._phase = phase
        values[INDEX["phase"]] = phase
        values[INDEX["phase_done"]] = values[INDEX["phase_total"]] = 0.0
        values[INDEX["phase_since"]] = values[INDEX["heartbeat"]] = now
        self._writer.publish()

    def begin_phase(self, name: str) -> None:
        """Enter a phase by the name that whoever loads an engine calls it."""
        self.enter_phase(Phase[name.upper()])

    def report_progress(self, done: int, total: int) -> None:
        """Show how much of the phase is done, in bytes or pieces."""
        now, values = time.monotonic(), self._values
        values[INDEX["phase_done"]], values[INDEX["phase_total"]] = done, total
        if done < total and now - values[INDEX["heartbeat"]] < PROGRESS_SECONDS:
            return
        values[INDEX["heartbeat"]] = now
        self._writer.publish()

    def fail(self, reason: str) -> None:
        """Leave the reason of the end to whoever watches."""
        self._writer.set_text(reason)
        self._failed_phase = self._phase
        self.enter_phase(Phase.FAILED)

    def exit_code(self, error: BaseException) -> int:
        """Return what a rank ends with once it has failed by an error.

        What is wrong with a configuration is told in its phase, before weights are read; memory that is short
        later, or a port that is taken, may be free at the next start.
        """
        wrong = isinstance(error, ValueError) and not isinstance(error, CannotListen)
        return CONFIGURATION_EXIT_CODE if wrong and self._failed_phase == Phase.CONFIG else 1


def phase_progress(ranks: Iterable[Snapshot], phase: Phase) -> float | None:
    """Return how much of a phase is done, 0 to 1, by the rank that is least far; None: nobody counts."""
    here = [rank for rank in ranks if rank["phase"] == phase and rank["phase_total"]]
    return min((rank["phase_done"] / rank["phase_total"] for rank in here), default=None)
