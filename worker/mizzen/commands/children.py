"""Child processes that live and end together."""

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
"""What a child may take beyond its own drain timeout before it is killed."""
SECOND_SIGNAL_SECONDS = 0.25
"""Between two signals to a child: those that come at the same time are one."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ChildExited:
    """A child ended; a negative code is a signal, as in `subprocess`."""

    name: str
    code: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """This process was asked to end."""

    signal: int


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """This process got a signal that does not end it."""

    signal: int


ChildEvent = ChildExited | StopRequested | SignalReceived


def terminate_with_parent() -> None:
    """End with the parent, even when it is killed (prctl(2), PR_SET_PDEATHSIG); runs in a new child.

    Does nothing where the kernel is not Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ChildProcesses:
    """Starts processes, queues their ends and this process's signals as events, and stops them in order."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[ChildEvent] = queue.SimpleQueue()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._previous_handlers: dict[int, object] = {}

    def handle_signals(self, *signals: int, event: Callable[[int], ChildEvent] = StopRequested) -> None:
        """Turn signals into events until `close`."""
        for number in signals:
            self._previous_handlers[number] = signal.signal(
                number, lambda received, _: self._events.put(event(received))
            )

    def start(self, name: str, command: Sequence[str], on_line: Callable[[str], None] | None = None) -> None:
        """Start a process in a group of its own, so that a terminal's Ctrl-C reaches this process alone.

        With `on_line`, that gets the process's standard error line by line, in a thread.
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
        """Return the next event, or None when none comes in `seconds`."""
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(event, ChildExited):
            self._running.pop(event.name, None)
        return event

    def signal(self, name: str, number: int) -> None:
        """Send a child a signal; one that ended gets none."""
        if name in self._running:
            self._running[name].send_signal(number)

    def stop(self, name: str, seconds: float, *, hurry: bool = False) -> None:
        """End a child by SIGTERM, and after `seconds` or at a second signal to this process by SIGKILL.

        With `hurry` the child gets SIGTERM twice, as from somebody who does not want to wait.
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
        """Wait until a child has ended; tell whether it has before the time is over or a signal comes."""
        deadline = time.monotonic() + seconds
        while name in self._running:
            event = self.next_event(max(0.0, deadline - time.monotonic()))
            if event is None or isinstance(event, StopRequested):
                return False
        return True

    def close(self) -> None:
        """Kill what still runs and give the signals back."""
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
    """Say how a process ended."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def shell_exit_code(code: int) -> int:
    """Return the exit code that stands for a child's unexpected end, as shells count: 128 plus a signal."""
    return 128 - code if code < 0 else code or 1
