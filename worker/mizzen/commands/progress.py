# SPDX-License-Identifier: Apache-2.0
"""Displays for the startup progress of `mizzen serve`, on terminals and in log files."""

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
    """Display that shows startup progress and notes to the user."""

    def on_line(self, name: str) -> OnLine | None:
        """Return a function that handles a process's log lines; None means that they are passed through."""
        ...

    def update(self, state: str, share: float | None = None, details: str = "") -> None:
        """Show the state of the startup, and the finished share of the work in this state, 0 to 1.

        Details may change with every call; a log file does not repeat them.
        """
        ...

    def note(self, text: str) -> None:
        """Show a line that stays visible."""
        ...


class PlainProgress(AbstractContextManager["PlainProgress"]):
    """Display for log files: writes a line for each new state, and after each quarter of the work in it."""

    def __init__(self) -> None:
        self._shown = ("", 0)

    def __exit__(self, *_: object) -> None:
        return None

    def on_line(self, name: str) -> OnLine | None:
        """Return None, so that log lines are passed through unchanged."""
        return None

    def update(self, state: str, share: float | None = None, details: str = "") -> None:
        """Write the state if it has changed, or if another quarter of the work in it is finished."""
        quarters = int((share or 0) * QUARTERS)
        if (state, quarters) != self._shown:
            self._shown = (state, quarters)
            self.note(format_progress(state, quarters / QUARTERS if quarters else None, details))

    def note(self, text: str) -> None:
        """Write a line."""
        print(f"mizzen: {text}", file=sys.stderr, flush=True)


class TerminalProgress(AbstractContextManager["TerminalProgress"]):
    """Display for terminals: shows a status line, and logged warnings and errors.

    If verbose, it shows all log lines.
    """

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
        """Return a function that shows a process's warnings and errors, or all its log lines if verbose."""

        def show(line: str) -> None:
            text = line if self._verbose else extract_warning(line)
            if text:
                self._console.print(f"{name}: {text}", markup=False, highlight=False)

        return show

    def update(self, state: str, share: float | None = None, details: str = "") -> None:
        """Show the state, the finished share of the work in it, and the time since the startup began."""
        seconds = time.monotonic() - self._began
        self._status.update(f"{format_progress(state, share, details)} ({seconds:.0f} s)")

    def note(self, text: str) -> None:
        """Show a line that stays visible, and remove the status line."""
        self._status.stop()
        self._console.print(f"mizzen: {text}", markup=False, highlight=False)


def format_progress(state: str, share: float | None, details: str = "") -> str:
    """Return text that shows a state, the finished share of the work in it (0 to 1, or None) and details."""
    text = state if share is None else f"{state}, {share:.0%}"
    return f"{text}: {details}" if details else text


def extract_warning(line: str) -> str:
    """Return the text to show for a log line.

    This is the event with its fields if the line is a warning or error, the whole line if it is not JSON, and
    an empty string otherwise.
    """
    try:
        entry = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return line
    if not isinstance(entry, dict) or entry.get("level") not in SHOWN_LEVELS:
        return ""
    details = {k: v for k, v in entry.items() if k not in HIDDEN_FIELDS}
    return f"{entry.get('event', '')} {' '.join(f'{k}={v}' for k, v in details.items())}".strip()


def create_progress(verbose: bool) -> StartupProgress:
    """Return the display for standard error, which may be a terminal or a log file."""
    return TerminalProgress(verbose) if sys.stderr.isatty() else PlainProgress()
