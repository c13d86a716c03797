"""Ties a process's life to its parent's (Linux: prctl(2), PR_SET_PDEATHSIG)."""

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
    """Have the kernel kill this process when the one of id `parent` dies, even while it cannot run Python.

    To the kernel, the parent is the thread that started this process: see `Starter`.

    Raises:
        ProcessLookupError: the parent has died already.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    if os.getppid() != parent:
        raise ProcessLookupError(f"the supervisor (process {parent}) is gone")


class SpawnThread(Generic[ResultT]):
    """A thread that starts processes and outlives them, whatever becomes of the thread that wants them."""

    def __init__(self, start: Callable[[], ResultT]) -> None:
        """Call `start` in the thread.

        Raises:
            Exception: `start` did, and the thread has ended.
        """
        self._future: Future[ResultT] = Future()
        self._closed = threading.Event()
        threading.Thread(target=self._run, args=(start,), name="mizzen-starter", daemon=True).start()
        self.result = self._future.result()
        """What `start` returned."""

    def close(self) -> None:
        """End the thread, and with it what still runs."""
        self._closed.set()

    def _run(self, start: Callable[[], ResultT]) -> None:
        try:
            self._future.set_result(start())
        except BaseException as error:
            self._future.set_exception(error)
            return
        self._closed.wait()
