# SPDX-License-Identifier: Apache-2.0
"""Sends signals from a node to all processes of a container, including the container's first process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from cluster import kubectl


def _processes(container: str) -> list[int]:
    """Return the sorted pids of a container's processes; empty if it runs on another machine."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if container in (folder / "cgroup").read_text():
                pids.append(int(folder.name))
        except OSError:
            continue
    return sorted(pids)


def _container(pod: dict[str, Any]) -> str:
    return pod["status"]["containerStatuses"][0]["containerID"].partition("://")[2]


def signal_all(pod: dict[str, Any], number: int) -> bool:
    """Signal all processes of a pod's first container; return False if it runs on another machine."""
    pids = _processes(_container(pod))
    for pid in pids:
        os.kill(pid, number)
    return bool(pids)


def kill_container(pod: dict[str, Any]) -> None:
    """Kill a pod's first container.

    If the container runs on this machine, its first process gets SIGKILL. Otherwise, all its other processes
    are killed, because no process inside a container can kill the first one. That ends an engine, but not a
    program without child processes.
    """
    pids = _processes(_container(pod))
    if pids:
        os.kill(pids[0], signal.SIGKILL)
        return
    target = ["-n", pod["metadata"]["namespace"], pod["metadata"]["name"]]
    kubectl("exec", *target, "--", "sh", "-c", "kill -9 -1")
