# SPDX-License-Identifier: Apache-2.0
"""Thread that keeps rank processes alive.

Every rank process calls `set_parent_death_signal` of `mizzen.common.child_process`, and dies with its parent.
To the kernel, the parent is a thread, which `SpawnThread` keeps alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


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
