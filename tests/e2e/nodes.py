"""Faults that only a node can make: a container's first process killed as by the kernel."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from cluster import kubectl


def _first_process(container: str) -> int | None:
    """Return the first process of a container on this machine; None when it runs elsewhere."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if container in (folder / "cgroup").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return min(found, default=None)


def kill_container(pod: dict[str, Any]) -> None:
    """End a pod's first container at once, by signal 9 where its node is this machine.

    Inside of a container nothing can kill its first process. Where the node is another machine, the processes
    that it started are killed, which ends an engine; a program without any goes on.
    """
    status = pod["status"]["containerStatuses"][0]
    process = _first_process(status["containerID"].partition("://")[2])
    if process is not None:
        os.kill(process, signal.SIGKILL)
        return
    where = ["-n", pod["metadata"]["namespace"], pod["metadata"]["name"]]
    kubectl("exec", *where, "--", "sh", "-c", "kill -9 -1")
