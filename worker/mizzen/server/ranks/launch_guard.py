# SPDX-License-Identifier: Apache-2.0
"""Abort a program whose kernel launches block for ever because another rank of its engine is gone.

A GPU queues about a thousand kernels; further launches block until one of them has run. If the first queued
kernel waits for a rank that is gone, launches block for ever, in a call that no exception can interrupt.
`LocalRanks` uses the guard.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

log = logging.getLogger(__name__)

LONG_LAUNCH_SECONDS = 2.0
"""Time in seconds after which the guard checks the other ranks if a launch has not returned."""
CHECK_SECONDS = 0.5
EXIT_SECONDS = 30
"""Maximum time in seconds that the program may take to exit once one of its ranks is gone."""


def abort_process() -> None:
    """Exit with code 1 immediately, because an orderly shutdown would wait for the GPU."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(1)


def arm_exit_alarm() -> None:
    """Make this process set an alarm when it exits, so that SIGALRM kills it if its GPU blocks the exit.

    If the alarm goes off, the process is reported as killed by SIGALRM; otherwise the exit code is unchanged.
    """
    atexit.register(_set_alarm)


def _set_alarm() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_SECONDS)


class LaunchGuard:
    """Context manager that a thread enters for each of its kernel launches; a second thread monitors them."""

    def __init__(
        self, find_fault: Callable[[], str | None], abort: Callable[[], None] = abort_process
    ) -> None:
        """Start the monitoring thread.

        Args:
            find_fault: Returns a description of a rank's failure, or None if all ranks are running.
            abort: Ends the program without waiting for the GPU.
        """
        self._find_fault = find_fault
        self._abort = abort
        self._since = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mizzen-launch-guard", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._since = 0.0

    def close(self) -> None:
        """Stop the monitoring thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(CHECK_SECONDS):
            since = self._since
            if not since or time.monotonic() - since < LONG_LAUNCH_SECONDS:
                continue
            fault = self._find_fault()
            if fault and self._since == since:
                log.critical("exiting because the GPU waits for a rank that is gone: %s", fault)
                self._abort()
