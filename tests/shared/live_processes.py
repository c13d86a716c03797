# SPDX-License-Identifier: Apache-2.0
"""Processes that tests started: whether they still run, and how they are ended."""

from __future__ import annotations

import contextlib
import subprocess

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie, which no parent has reaped yet, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_tree(process: subprocess.Popen[bytes] | psutil.Popen, seconds: float = 60.0) -> None:
    """Kill a process with all of its descendants if it still runs, and wait up to `seconds` for its end."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
    process.wait(seconds)
