# SPDX-License-Identifier: Apache-2.0
"""Finds and prints the logs of a cluster's processes and of its pods, including ended pods."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from mizzen_local.state import PARTS

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Log:
    """One log file.

    Attributes:
        title: name of the process, or of the pod and container, that writes the log.
        path: path of the file.
    """

    title: str
    path: Path


def find_logs(folder: Path, target: str, namespace: str, container: str, *, previous: bool) -> list[Log]:
    """Return the logs of a cluster process, or of pods.

    Args:
        folder: folder of all logs.
        target: name of a process, such as `kube-apiserver` or `node`; or name of a pod; or a part of pods'
            names that consists of whole words joined by hyphens, such as the name of an InferenceService.
        namespace: namespace of the pods; all if empty.
        container: name of the container; if empty, the logs of all containers of the pods are returned.
        previous: return the log of each container's second-to-last run instead of its last one; containers
            that have run only once are left out.
    """
    part = folder / f"{target}.log"
    if target in PARTS and part.exists():
        return [Log(target, part)]
    pods = [path for path in (folder / "pods").glob(f"{namespace or '*'}_*") if path.is_dir()]
    exact = [path for path in pods if path.name.split("_")[1] == target]
    if exact:
        pods = [max(exact, key=lambda path: path.stat().st_mtime)]
    else:
        pods = [path for path in pods if f"-{path.name.split('_')[1]}-".find(f"-{target}-") >= 0]
    logs_found: list[Log] = []
    for pod in sorted(pods, key=lambda path: path.stat().st_mtime):
        for folder in sorted(pod.glob(container or "*")):
            logs = _sort_by_run(folder)
            if len(logs) > previous:
                logs_found.append(
                    Log(f"{pod.name.split('_')[1]}/{folder.name}", logs[-2 if previous else -1])
                )
    return logs_found


def find_run_logs(folder: Path, namespace: str, pod: str, container: str) -> list[Path]:
    """Return the logs of all runs of a container, the oldest first.

    If several pods have had that name, these are the logs of the newest pod.
    """
    pods = (folder / "pods").glob(f"{namespace}_{pod}_*")
    newest = max(pods, key=lambda path: path.stat().st_mtime, default=None)
    return _sort_by_run(newest / container) if newest is not None else []


def _sort_by_run(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"), key=lambda path: int(path.stem))


def tail_offset(path: Path, lines: int | None) -> int:
    """Return the offset in bytes at which the last `lines` lines of a file begin; 0 if `lines` is None."""
    if lines is None:
        return 0
    with path.open("rb") as file:
        data = file.read()
    return len(data) - len(_tail(data, lines))


def _tail(data: bytes, lines: int | None) -> bytes:
    return data if lines is None else b"".join(data.splitlines(keepends=True)[-lines:] if lines else [])


def list_targets(folder: Path) -> list[str]:
    """Return the names of all cluster processes and pods that have a log."""
    pods = {path.name.split("_")[1] for path in (folder / "pods").glob("*_*")}
    return [part for part in PARTS if (folder / f"{part}.log").exists()] + sorted(pods)


def print_logs(logs: Sequence[Log], out: TextIO, *, tail: int | None, follow: bool) -> None:
    """Print logs; if there are several, print a log's title wherever the output switches to it.

    Args:
        logs: the logs to print.
        out: file to print to.
        tail: number of lines to print from the end of each log; None prints each log from its beginning.
        follow: print new lines as they are written, until interrupted.
    """
    files = [(log, log.path.open("rb")) for log in logs]
    last: Log | None = None
    try:
        for log, file in files:
            last = _print(log, _tail(file.read(), tail), out, last, several=len(logs) > 1)
        while follow:
            time.sleep(POLL_SECONDS)
            for log, file in files:
                if data := file.read():
                    last = _print(log, data, out, last, several=len(logs) > 1)
    finally:
        for _, file in files:
            file.close()


def _print(log: Log, data: bytes, out: TextIO, last: Log | None, *, several: bool) -> Log:
    if several and log != last:
        out.write(f"==> {log.title}\n")
    out.write(data.decode(errors="replace"))
    out.flush()
    return log
