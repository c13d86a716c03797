"""Ends a program whose calls to its GPU will never return, for a rank that shares the model is gone.

A GPU takes about a thousand kernels ahead; further launches wait. Where the first of them waits for another
rank, that is for ever, in a call that no exception reaches.
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
"""A launch that takes longer is looked after."""
CHECK_SECONDS = 0.5
EXIT_SECONDS = 30
"""What taking a program apart may take once a rank of it is gone."""


def abort_process() -> None:
    """End the process at once: nothing of it can be taken apart in order."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(1)


def arm_exit_alarm() -> None:
    """Have the kernel end this process soon after its end has begun: what its GPU is at may never let it go.

    The exit code is minus SIGALRM then, else what it would be.
    """
    atexit.register(_set_alarm)


def _set_alarm() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_SECONDS)


class LaunchGuard:
    """A context around each launch of one thread. `close` ends the thread that looks after it."""

    def __init__(
        self, find_fault: Callable[[], str | None], abort: Callable[[], None] = abort_process
    ) -> None:
        """Take what tells why another rank is gone, if one is, and how to end the program."""
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
        """Look no more."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(CHECK_SECONDS):
            since = self._since
            if not since or time.monotonic() - since < LONG_LAUNCH_SECONDS:
                continue
            fault = self._find_fault()
            if fault and self._since == since:
                log.critical("the program ends, for its GPU waits for a rank that is gone: %s", fault)
                self._abort()
