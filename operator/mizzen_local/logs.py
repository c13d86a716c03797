"""The cluster's logs: of its parts, and of pods, also of those that have ended."""

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
        title: what it is the log of.
        path: where it is.
    """

    title: str
    path: Path


def find(folder: Path, target: str, namespace: str, container: str, *, previous: bool) -> list[Log]:
    """The logs of a part, or of the pods of a name or whose names begin with it.

    Args:
        folder: the folder of logs.
        target: e.g. `kube-apiserver`, `node`, a pod's name, an InferenceService's name.
        namespace: of pods; all when empty.
        container: of pods; all when empty.
        previous: the run before the last one.
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
    found: list[Log] = []
    for pod in sorted(pods, key=lambda path: path.stat().st_mtime):
        for folder in sorted(pod.glob(container or "*")):
            logs = _in_order(folder)
            if len(logs) > previous:
                found.append(Log(f"{pod.name.split('_')[1]}/{folder.name}", logs[-2 if previous else -1]))
    return found


def runs(folder: Path, namespace: str, pod: str, container: str) -> list[Path]:
    """The log of each run of a container, the last one last; of the newest of several pods of the name."""
    pods = (folder / "pods").glob(f"{namespace}_{pod}_*")
    newest = max(pods, key=lambda path: path.stat().st_mtime, default=None)
    return _in_order(newest / container) if newest is not None else []


def _in_order(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"), key=lambda path: int(path.stem))


def tail_start(path: Path, lines: int | None) -> int:
    """Where the last so many lines of a file begin; 0 when None."""
    if lines is None:
        return 0
    with path.open("rb") as file:
        data = file.read()
    return len(data) - len(_tail(data, lines))


def _tail(data: bytes, lines: int | None) -> bytes:
    return data if lines is None else b"".join(data.splitlines(keepends=True)[-lines:] if lines else [])


def known(folder: Path) -> list[str]:
    """Everything that has a log."""
    pods = {path.name.split("_")[1] for path in (folder / "pods").glob("*_*")}
    return [part for part in PARTS if (folder / f"{part}.log").exists()] + sorted(pods)


def show(logs: Sequence[Log], out: TextIO, *, tail: int | None, follow: bool) -> None:
    """Print logs, with titles when there are several.

    Args:
        logs: which.
        out: where to.
        tail: only so many lines of each; all when None.
        follow: go on with what comes, until interrupted.
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
