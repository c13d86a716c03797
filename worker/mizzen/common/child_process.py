# SPDX-License-Identifier: Apache-2.0
"""Settings of child processes: they end with their parent, run behind it, and use limited memory."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment variables that keep libraries from starting threads."""


def set_parent_death_signal(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, even if this process is stuck.

    It uses PR_SET_PDEATHSIG of prctl(2), on Linux. To the kernel, the parent is the thread that started this
    process, so that thread must keep running.

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
        raise ProcessLookupError(f"the parent (process {parent}) is gone")


def run_behind_parent() -> None:
    """Give this process a lower priority than its parent, and leave the signals to stop to the parent.

    The parent receives these signals too, and stops this process itself.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)


def limit_memory(more_bytes: int) -> None:
    """Forbid this process to dump its memory, and limit its address space, on Linux.

    Args:
        more_bytes: Maximum address space in bytes, in addition to what the process uses now.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            used_bytes = int(file.read().split()[0]) * resource.getpagesize()
        limit_bytes = used_bytes + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
