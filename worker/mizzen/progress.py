# SPDX-License-Identifier: Apache-2.0
"""Progress bar for a batch of offline requests."""

from __future__ import annotations

import time
from types import TracebackType


class ProgressBar:
    """Progress bar on standard error that shows finished requests and generated tokens per second."""

    def __init__(self, requests: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("answers"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.task = self.bar.add_task("answers", total=requests, rate=0.0)
        self.tokens = 0
        self.started_at = time.monotonic()

    def __enter__(self) -> ProgressBar:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def advance(self, requests: int, tokens: int) -> None:
        """Add newly finished requests and newly generated tokens to the bar."""
        self.tokens += tokens
        rate = self.tokens / max(time.monotonic() - self.started_at, 1e-3)
        self.bar.update(self.task, advance=requests, rate=rate)
