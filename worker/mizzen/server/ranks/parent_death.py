"""End a process when its parent dies (Linux: prctl(2), PR_SET_PDEATHSIG).

Every rank process calls `set_parent_death_signal`; `SpawnThread` keeps the parent thread alive.
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
    """Have the kernel kill this process when process `parent` dies, even if it cannot run Python code then.

    To the kernel, the parent is the thread that started this process: see `SpawnThread`.

    Raises:
        ProcessLookupError: the parent has already died.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    if os.getppid() != parent:
        raise ProcessLookupError(f"the supervisor (process {parent}) is gone")


class SpawnThread(Generic[ResultT]):
    """Thread that starts processes and outlives them, even if the thread that requested them ends."""

    def __init__(self, start: Callable[[], ResultT]) -> None:
        """Call `start` in the thread.

        Raises:
            Exception: `start` raised it; the thread has ended.
        """
        self._future: Future[ResultT] = Future()
        self._closed = threading.Event()
        threading.Thread(target=self._run, args=(start,), name="mizzen-starter", daemon=True).start()
        self.result = self._future.result()
        """Return value of `start`."""

    def close(self) -> None:
        """End the thread, and with it all processes that still run."""
        self._closed.set()

    def _run(self, start: Callable[[], ResultT]) -> None:
        try:
            self._future.set_result(start())
        except BaseException as error:
            self._future.set_exception(error)
            return
        self._closed.wait()
