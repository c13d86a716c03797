"""The phases of a rank on their way into the status block."""

from __future__ import annotations

import time

from mizzen.server.catalogue import INDEX, STARTUP_PHASES, Phase
from mizzen.server.status import StatusWriter


class PhaseStatus:
    """Shows which phase a rank is in, and at the end why it failed."""

    def __init__(self, writer: StatusWriter) -> None:
        self._writer = writer
        self._values = writer.values
        self._phase = Phase.SPAWN

    def phase(self, phase: Phase) -> None:
        """Enter a phase; the time in a start-up phase is its metric."""
        now, values = time.monotonic(), self._values
        if self._phase in STARTUP_PHASES:
            values[INDEX[f"phase_seconds_{self._phase.name}"]] += now - values[INDEX["phase_since"]]
        self._phase = phase
        values[INDEX["phase"]] = phase
        values[INDEX["phase_since"]] = values[INDEX["heartbeat"]] = now
        self._writer.publish()

    def report(self, name: str) -> None:
        """Enter a phase by the name that whoever loads an engine calls it."""
        self.phase(Phase[name.upper()])

    def fail(self, reason: str) -> None:
        """Leave the reason of the end to whoever watches."""
        self._writer.set_text(reason)
        self.phase(Phase.FAILED)
