# SPDX-License-Identifier: Apache-2.0
"""Publish a rank's phase and the progress of its startup in the rank's status block."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from mizzen.models.hf_fields import ConfigError
from mizzen.server.exit_reason import CONFIGURATION_EXIT_CODE
from mizzen.server.metric_catalogue import INDEX, STARTUP_PHASES, Phase
from mizzen.server.status_block import Snapshot, StatusWriter
from mizzen.weights.checkpoint_files import WeightsError
from mizzen.wire.ranks.group_socket import CannotListen

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.1
"""Minimum time in seconds between two publications of a phase's progress."""


class PhaseStatus:
    """Publishes a rank's phase, the progress of the phase and, if the rank fails, the reason."""

    def __init__(self, writer: StatusWriter) -> None:
        self._writer = writer
        self._values = writer.values
        self._phase = Phase.SPAWN
        self._failed_phase = Phase.SPAWN

    def enter_phase(self, phase: Phase) -> None:
        """Publish a new phase; record and log the duration of the previous phase if it was a startup
        phase."""
        now, values = time.monotonic(), self._values
        if self._phase in STARTUP_PHASES:
            spent = INDEX[f"phase_seconds_{self._phase.name}"]
            values[spent] += now - values[INDEX["phase_since"]]
            if phase not in (self._phase, Phase.FAILED):
                fields = {"phase": self._phase.name.lower(), "seconds": round(values[spent], 3)}
                log.info("startup phase finished", extra={"fields": fields})
        self._phase = phase
        values[INDEX["phase"]] = phase
        values[INDEX["phase_done"]] = values[INDEX["phase_total"]] = 0.0
        values[INDEX["phase_since"]] = values[INDEX["heartbeat"]] = now
        self._writer.publish()

    def begin_phase(self, name: str) -> None:
        """Enter a startup phase; `name` is the phase's name in lower case, such as `weights`."""
        self.enter_phase(Phase[name.upper()])

    def report_progress(self, done: int, total: int) -> None:
        """Publish how much of the current phase's work is done, and the total; the unit is bytes or items."""
        now, values = time.monotonic(), self._values
        values[INDEX["phase_done"]], values[INDEX["phase_total"]] = done, total
        if done < total and now - values[INDEX["heartbeat"]] < PROGRESS_SECONDS:
            return
        values[INDEX["heartbeat"]] = now
        self._writer.publish()

    def fail(self, reason: str) -> None:
        """Enter the phase FAILED and publish the reason."""
        self._writer.set_text(reason)
        self._failed_phase = self._phase
        self.enter_phase(Phase.FAILED)

    def exit_code(self, error: BaseException) -> int:
        """Return the exit code for a rank that failed with an error; call this after `fail`.

        A ValueError in the config phase, before weights are read, means that the configuration is invalid,
        and so does a checkpoint whose tensors do not suit the model. All other errors, such as too little
        memory, a port in use or a file that cannot be read, might not recur after a restart.
        """
        wrong = isinstance(error, ValueError) and not isinstance(error, CannotListen)
        if self._failed_phase == Phase.WEIGHTS:
            wrong = isinstance(error, (WeightsError, ConfigError)) and error.__cause__ is None
        elif self._failed_phase != Phase.CONFIG:
            wrong = False
        return CONFIGURATION_EXIT_CODE if wrong else 1


def phase_progress(ranks: Iterable[Snapshot], phase: Phase) -> float | None:
    """Return the progress (0 to 1) of the slowest rank in a phase; None if no rank reports progress in it."""
    in_phase = [rank for rank in ranks if rank["phase"] == phase and rank["phase_total"]]
    return min((rank["phase_done"] / rank["phase_total"] for rank in in_phase), default=None)
