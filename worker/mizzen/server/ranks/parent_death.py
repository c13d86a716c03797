# SPDX-License-Identifier: Apache-2.0
"""End a process when its parent dies (Linux: prctl(2), PR_SET_PDEATHSIG).

Every rank process calls `set_parent_death_signal`. To the kernel, the parent is a thread, which `SpawnThread`
keeps alive.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

_PR_SET_PDEATHSIG = 1
ResultT = TypeVar("ResultT")


def set_parent_death_signal(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, even if this process is stuck.

    To the kernel, the parent is the thread that started this process; see `SpawnThread`.

    Args:
        parent: Process id of the parent.

    Raises:
        ProcessLookupError: the parent has already died.
        OSError: prctl(2) failed.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    if os.getppid() != parent:
        raise ProcessLookupError(f"the supervisor (process {parent}) is gone")


class SpawnThread(Generic[ResultT]):
    """Thread that starts child processes and keeps running, so that the children survive the end of the
    caller's thread."""

    def __init__(self, start: Callable[[], ResultT]) -> None:
        """Call `start` in the new thread, and wait until it returns.

        Raises:
            Exception: the error that `start` raised; the thread has ended.
        """
        self._future: Future[ResultT] = Future()
        self._closed = threading.Event()
        threading.Thread(target=self._run, args=(start,), name="mizzen-starter", daemon=True).start()
        self.result = self._future.result()
        """Return value of `start`."""

    def close(self) -> None:
        """End the thread; the kernel then kills the child processes that are still running."""
        self._closed.set()

    def _run(self, start: Callable[[], ResultT]) -> None:
        try:
            self._future.set_result(start())
        except BaseException as error:
            self._future.set_exception(error)
            return
        self._closed.wait()
