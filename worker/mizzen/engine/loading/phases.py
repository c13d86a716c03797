# SPDX-License-Identifier: Apache-2.0
"""Start-up phases of an engine, which are reported and measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ReportPhase = Callable[[str], None]
"""Function that is called with the name of each start-up phase when the phase begins."""


class StartupPhases:
    """Measures the duration of each start-up phase, and reports each phase when it begins."""

    def __init__(self, report: ReportPhase) -> None:
        self.report = report
        self.seconds: dict[str, float] = {}
        self.current = ""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Report the phase `name`, and measure how long the phase (the code in the context) takes."""
        self.report(name)
        self.current = name
        start_time = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start_time
