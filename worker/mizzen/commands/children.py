# SPDX-License-Identifier: Apache-2.0
"""Start, monitor and stop child processes.

`mizzen serve` runs its engine and its gateway in this way.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

KILL_GRACE_SECONDS = 10.0
"""A child is killed if it has not exited this many seconds after the end of its drain timeout."""
SECOND_SIGNAL_SECONDS = 0.25
"""Pause between two signals to a child, in seconds; without it, the kernel may merge the two signals."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ChildExited:
    """Event: a child has exited. The code is negative if a signal killed the child, as in `subprocess`."""

    name: str
    code: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Event: this process received a signal that requests its exit."""

    signal: int


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """Event: this process received another signal, which does not request its exit."""

    signal: int


ChildEvent = ChildExited | StopRequested | SignalReceived


def terminate_with_parent() -> None:
    """Make this process receive SIGTERM when its parent dies (prctl(2), PR_SET_PDEATHSIG).

    Called in a new child process. Does nothing on operating systems other than Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ChildProcesses:
    """Child processes by name, and a queue of events: exits of children and signals to this process."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[ChildEvent] = queue.SimpleQueue()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._previous_handlers: dict[int, object] = {}

    def handle_signals(self, *signals: int, event: Callable[[int], ChildEvent] = StopRequested) -> None:
        """Queue an event whenever this process receives one of `signals`, until `close` is called."""
        for number in signals:
            self._previous_handlers[number] = signal.signal(
                number, lambda received, _: self._events.put(event(received))
            )

    def start(self, name: str, command: Sequence[str], on_line: Callable[[str], None] | None = None) -> None:
        """Start a child in its own session, so that Ctrl-C on a terminal signals only this process.

        If `on_line` is not None, a thread calls it with each line of the child's standard error.
        """
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            stderr=subprocess.PIPE if on_line else None,
            start_new_session=True,
            preexec_fn=terminate_with_parent,
        )
        self._running[name] = process
        if on_line:
            threading.Thread(target=_read_lines, args=(process, on_line), daemon=True).start()
        threading.Thread(target=self._wait, args=(name, process), daemon=True).start()

    def _wait(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self._events.put(ChildExited(name, process.wait()))

    def next_event(self, seconds: float | None = None) -> ChildEvent | None:
        """Return the next event, or None if there is no event within `seconds`.

        If `seconds` is None, wait without a limit.
        """
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(event, ChildExited):
            self._running.pop(event.name, None)
        return event

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a child; do nothing if it has exited."""
        if name in self._running:
            self._running[name].send_signal(number)

    def stop(self, name: str, seconds: float, *, hurry: bool = False) -> None:
        """Stop a child: send SIGTERM, wait up to `seconds` for its exit, and then send SIGKILL.

        SIGKILL is sent at once if this process receives another signal that requests its exit. With `hurry`,
        the child receives SIGTERM twice, which makes it exit without draining.
        """
        process = self._running.get(name)
        if process is None:
            return
        process.terminate()
        if hurry and not self._wait_for_exit(name, SECOND_SIGNAL_SECONDS):
            process.terminate()
        if not self._wait_for_exit(name, seconds):
            _kill_group(process)
            process.wait()
            self._running.pop(name, None)

    def _wait_for_exit(self, name: str, seconds: float) -> bool:
        """Wait until a child exits, and return True.

        Returns False if that takes more than `seconds`, or if a signal requests the exit of this process.
        """
        deadline = time.monotonic() + seconds
        while name in self._running:
            event = self.next_event(max(0.0, deadline - time.monotonic()))
            if event is None or isinstance(event, StopRequested):
                return False
        return True

    def close(self) -> None:
        """Kill all children that are still running, and restore the signal handlers."""
        for process in self._running.values():
            _kill_group(process)
            process.wait()
        self._running.clear()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _read_lines(process: subprocess.Popen[bytes], on_line: Callable[[str], None]) -> None:
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            on_line(line.decode(errors="replace").rstrip("\n"))


def describe_exit(code: int) -> str:
    """Return a predicate for a sentence about a process that exited, such as "exited with code 1"."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def shell_exit_code(code: int) -> int:
    """Return the exit code by which this process reports the unexpected exit of a child.

    As in shells, it is 128 + n if signal n killed the child. It is 1 if the child exited with code 0, and
    otherwise the child's exit code.
    """
    return 128 - code if code < 0 else code or 1
