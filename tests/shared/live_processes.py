# SPDX-License-Identifier: Apache-2.0
"""Processes that tests started, and whether they still run."""

from __future__ import annotations

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie, which no parent has reaped yet, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
