"""What `mizzen serve` shows while it starts, on a terminal and elsewhere."""

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
    """Shows how a start goes on, and notes for the user."""

    def on_line(self, name: str) -> OnLine | None:
        """Return what takes the log lines of a process; None lets them through as they are."""
        ...

    def update(self, state: str, share: float | None = None) -> None:
        """Show how far the start is: in words, and how much of that is done, 0 to 1."""
        ...

    def note(self, text: str) -> None:
        """Show a line that stays."""
        ...


class PlainProgress(AbstractContextManager["PlainProgress"]):
    """For log files: a line whenever the state changes, and with each quarter of one that takes long."""

    def __init__(self) -> None:
        self._shown = ("", 0)

    def __exit__(self, *_: object) -> None:
        return None

    def on_line(self, name: str) -> OnLine | None:
        """Let log lines through."""
        return None

    def update(self, state: str, share: float | None = None) -> None:
        """Write the state when it is new, or a quarter further."""
        quarters = int((share or 0) * QUARTERS)
        if (state, quarters) != self._shown:
            self._shown = (state, quarters)
            self.note(format_progress(state, quarters / QUARTERS if quarters else None))

    def note(self, text: str) -> None:
        """Write a line."""
        print(f"mizzen: {text}", file=sys.stderr, flush=True)


class TerminalProgress(AbstractContextManager["TerminalProgress"]):
    """For people: a line that moves, and of the logs only what they should know."""

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
        """Show a process's warnings, and all of its lines when verbose."""

        def show(line: str) -> None:
            text = line if self._verbose else extract_warning(line)
            if text:
                self._console.print(f"{name}: {text}", markup=False, highlight=False)

        return show

    def update(self, state: str, share: float | None = None) -> None:
        """Show the state and how long the start has taken."""
        self._status.update(f"{format_progress(state, share)} ({time.monotonic() - self._began:.0f} s)")

    def note(self, text: str) -> None:
        """Show a line for good; the moving one ends."""
        self._status.stop()
        self._console.print(f"mizzen: {text}", markup=False, highlight=False)


def format_progress(state: str, share: float | None) -> str:
    """Say how far a start is."""
    return state if share is None else f"{state}, {share:.0%}"


def extract_warning(line: str) -> str:
    """Return what a person should read of a log line: its event if it warns, or all if it is no JSON."""
    try:
        entry = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return line
    if not isinstance(entry, dict) or entry.get("level") not in SHOWN_LEVELS:
        return ""
    details = {k: v for k, v in entry.items() if k not in HIDDEN_FIELDS}
    return f"{entry.get('event', '')} {' '.join(f'{k}={v}' for k, v in details.items())}".strip()


def create_progress(verbose: bool) -> StartupProgress:
    """Return the display that fits standard error."""
    return TerminalProgress(verbose) if sys.stderr.isatty() else PlainProgress()
