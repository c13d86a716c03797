"""Startup progress that `mizzen serve` shows, on a terminal and elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

OnLine = Callable[[str], None]
SHOWN_LEVELS = ("warning", "error", "critical")
QUARTERS = 4
HIDDEN_FIELDS = ("time", "level", "event", "process", "program", "traceback")


class StartupProgress(AbstractContextManager["StartupProgress"], Protocol):
    """Display of startup progress and of notes for the user."""

    def on_line(self, name: str) -> OnLine | None:
        """Return a function that handles a process's log lines, or None to pass them through unchanged."""
        ...

    def update(self, state: str, share: float | None = None) -> None:
        """Show the state of the startup, and the finished share of that state, 0 to 1."""
        ...

    def note(self, text: str) -> None:
        """Show a permanent line."""
        ...


class PlainProgress(AbstractContextManager["PlainProgress"]):
    """Display for log files: a line whenever the state changes, and at each quarter of a long state."""

    def __init__(self) -> None:
        self._shown = ("", 0)

    def __exit__(self, *_: object) -> None:
        return None

    def on_line(self, name: str) -> OnLine | None:
        """Pass log lines through."""
        return None

    def update(self, state: str, share: float | None = None) -> None:
        """Write the state if it has changed or advanced by a quarter."""
        quarters = int((share or 0) * QUARTERS)
        if (state, quarters) != self._shown:
            self._shown = (state, quarters)
            self.note(format_progress(state, quarters / QUARTERS if quarters else None))

    def note(self, text: str) -> None:
        """Write a line."""
        print(f"mizzen: {text}", file=sys.stderr, flush=True)


class TerminalProgress(AbstractContextManager["TerminalProgress"]):
    """Display for terminals: a status line, and only the warnings of the logs."""

    def __init__(self, verbose: bool) -> None:
        from rich.console import Console
        from rich.status import Status

        self._verbose = verbose
        self._console = Console(stderr=True)
        self._status = Status("starting", console=self._console)
        self._began = time.monotonic()

    def __enter__(self) -> TerminalProgress:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def on_line(self, name: str) -> OnLine | None:
        """Return a function that shows a process's warnings, or all of its lines if verbose."""

        def show(line: str) -> None:
            text = line if self._verbose else extract_warning(line)
            if text:
                self._console.print(f"{name}: {text}", markup=False, highlight=False)

        return show

    def update(self, state: str, share: float | None = None) -> None:
        """Show the state and the time since the startup began."""
        self._status.update(f"{format_progress(state, share)} ({time.monotonic() - self._began:.0f} s)")

    def note(self, text: str) -> None:
        """Show a permanent line and remove the status line."""
        self._status.stop()
        self._console.print(f"mizzen: {text}", markup=False, highlight=False)


def format_progress(state: str, share: float | None) -> str:
    """Format a state and its finished share."""
    return state if share is None else f"{state}, {share:.0%}"


def extract_warning(line: str) -> str:
    """Return the event and fields of a log line if it is a warning, the whole line if it is not JSON, else
    \"\"."""
    try:
        entry = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return line
    if not isinstance(entry, dict) or entry.get("level") not in SHOWN_LEVELS:
        return ""
    details = {k: v for k, v in entry.items() if k not in HIDDEN_FIELDS}
    return f"{entry.get('event', '')} {' '.join(f'{k}={v}' for k, v in details.items())}".strip()


def create_progress(verbose: bool) -> StartupProgress:
    """Return the display that suits standard error."""
    return TerminalProgress(verbose) if sys.stderr.isatty() else PlainProgress()
