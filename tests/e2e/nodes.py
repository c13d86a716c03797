"""Faults that only a node can make: a container's first process killed as by the kernel."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from cluster import kubectl


def _processes(container: str) -> list[int]:
    """Return the processes of a container on this machine, its first one first; none when it is elsewhere."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if container in (folder / "cgroup").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return sorted(found)


def _container(pod: dict[str, Any]) -> str:
    return pod["status"]["containerStatuses"][0]["containerID"].partition("://")[2]


def signal_all(pod: dict[str, Any], number: int) -> bool:
    """Send a signal to all processes of a pod's first container; False when its node is another machine."""
    found = _processes(_container(pod))
    for process in found:
        os.kill(process, number)
    return bool(found)


def kill_container(pod: dict[str, Any]) -> None:
    """End a pod's first container at once, by signal 9 where its node is this machine.

    Inside of a container nothing can kill its first process. Where the node is another machine, the processes
    that it started are killed, which ends an engine; a program without any goes on.
    """
    found = _processes(_container(pod))
    if found:
        os.kill(found[0], signal.SIGKILL)
        return
    where = ["-n", pod["metadata"]["namespace"], pod["metadata"]["name"]]
    kubectl("exec", *where, "--", "sh", "-c", "kill -9 -1")
