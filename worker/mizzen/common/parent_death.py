# SPDX-License-Identifier: Apache-2.0
"""End a process when its parent dies (Linux: prctl(2), PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def set_parent_death_signal(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, even if this process is stuck.

    To the kernel, the parent is the thread that started this process, so that thread must keep running.

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
