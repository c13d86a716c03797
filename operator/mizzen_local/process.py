# SPDX-License-Identifier: Apache-2.0
"""Detached processes on Linux: each has its own session, and is identified by pid and start time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

MARK = "MIZZEN_LOCAL_MARK"
"""Environment variable that marks all processes of a cluster.

Its value is the cluster's folder and a slash. For a process of a container, this is followed by the path of
the pod, container and run within that folder. So a prefix of the value selects all processes of the cluster,
a pod, a container or a run.
"""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that was started and may have ended; pid and start time identify it.

    Attributes:
        name: name of the process, such as `etcd`.
        pid: process id; also the id of the session and process group that it leads.
        started: start time in clock ticks since the machine booted, from /proc.
    """

    name: str
    pid: int
    started: int

    def alive(self) -> bool:
        """Return whether the process still runs; a zombie or a reused pid counts as ended."""
        return read_start_time(self.pid) == self.started

    def signal(self, number: int) -> None:
        """Send a signal to the process group if the process still runs."""
        if self.alive():
            signal_group(self.pid, number)


def read_start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks; None if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group; do nothing if the group no longer exists."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def start(
    name: str,
    command: Sequence[str],
    *,
    log: Path,
    folder: Path,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Process:
    """Start a program in its own session, detached from the caller's standard streams.

    Args:
        name: name of the process.
        command: program and arguments.
        log: file to which the process's output is appended.
        folder: the cluster's folder, which becomes the process's working directory; with a slash appended,
            it becomes the value of `MARK` in the process's environment.
        env: environment of the process; None for the caller's environment.
        pass_fds: file descriptors that the process inherits; it inherits no others.

    Raises:
        OSError: the program cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**(os.environ if env is None else env), MARK: f"{folder}/"},
            start_new_session=True,
            pass_fds=pass_fds,
        )
    # The child outlives this program, so nothing waits for it; without a returncode Popen would warn.
    child.returncode = 0
    return Process(name, child.pid, read_start_time(child.pid) or 0)


def reap(pid: int) -> None:
    """Reap a child if it has ended; do nothing if the pid is not a child of this process."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def stop(processes: Iterable[Process], *, grace: float) -> None:
    """Send SIGTERM to all processes, and SIGKILL to any that still run after `grace` seconds."""
    running = [process for process in processes if process.alive()]
    for process in running if grace > 0 else ():
        process.signal(signal.SIGTERM)
    wait_ended(running, grace)
    for process in running:
        process.signal(signal.SIGKILL)
    wait_ended(running, 5.0)


def wait_ended(processes: Iterable[Process], seconds: float) -> bool:
    """Wait up to `seconds` for all processes to end; return whether they have ended."""
    deadline = time.monotonic() + seconds
    processes = list(processes)
    while left := [process for process in processes if process.alive()]:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    for process in processes:
        reap(process.pid)
    return not left


def find_marked(prefix: str) -> list[Process]:
    """Return the processes of this user, in any session, whose `MARK` begins with `prefix`."""
    entry_prefix = f"{MARK}={prefix}".encode()
    processes_found: list[Process] = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue
        if any(variable.startswith(entry_prefix) for variable in environment.split(b"\0")):
            start_time = read_start_time(int(entry))
            if start_time is not None:
                processes_found.append(Process("", int(entry), start_time))
    return processes_found


def kill_marked(prefix: str, seconds: float = 5.0) -> int:
    """Send SIGKILL to all processes whose `MARK` begins with `prefix`, and repeat this until all have ended.

    Args:
        prefix: prefix of the value of `MARK`.
        seconds: maximum duration.

    Returns:
        The number of processes killed.
    """
    deadline, killed = time.monotonic() + seconds, set[Process]()
    while (processes_found := find_marked(prefix)) and time.monotonic() < deadline:
        for process in processes_found:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        killed.update(processes_found)
        time.sleep(0.005)
    return len(killed)


class Registry:
    """A file that lists a cluster's processes, so that `down` finds them even if `up` crashed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Process]:
        """Return all processes that were added; an empty list if the file is missing or invalid."""
        try:
            return [Process(**entry) for entry in json.loads(self.path.read_text())]
        except (OSError, ValueError, TypeError):
            return []

    def add(self, process: Process) -> Process:
        """Add a process, replacing an earlier one of the same name; return the added process."""
        kept = [entry for entry in self.read() if entry.name != process.name]
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps([asdict(entry) for entry in [*kept, process]], indent=1))
        temporary.replace(self.path)
        return process
