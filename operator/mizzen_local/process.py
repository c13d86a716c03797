"""Detached processes on Linux: started in sessions of their own, remembered by pid and start time."""

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
"""Variable in the environment of everything that a cluster starts: the cluster's folder and a slash, for a
container also its run's path below the folder, so that a prefix names them all."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process that runs, or ran; the start time tells it from a later one of the same pid.

    Attributes:
        name: what it is, e.g. `etcd`.
        pid: process id; it also leads a session and a process group of that id.
        started: clock ticks since the machine's boot, from /proc.
    """

    name: str
    pid: int
    started: int

    def alive(self) -> bool:
        """Whether this very process still runs; a zombie counts as ended."""
        return started(self.pid) == self.started

    def signal(self, number: int) -> None:
        """Send a signal to the process's group, if this very process still runs."""
        if self.alive():
            signal_group(self.pid, number)


def started(pid: int) -> int | None:
    """Start time of a process in clock ticks; None when there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def signal_group(pid: int, number: int) -> None:
    """Signal a process group; one that has ended is no error."""
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
    """Start a program in a session of its own, with nothing of the caller's standard streams.

    Args:
        name: what it is.
        command: program and arguments.
        log: file that its output is appended to.
        folder: the cluster's folder; also its working directory, and its mark in /proc.
        env: its environment; the caller's when None.
        pass_fds: descriptors that it keeps; it gets no other.

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
    # The child outlives this program, so nothing here waits for it; without this, Popen warns.
    child.returncode = 0
    return Process(name, child.pid, started(child.pid) or 0)


def reap(pid: int) -> None:
    """Collect a child that has ended; others are left alone."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def stop(processes: Iterable[Process], *, grace: float) -> None:
    """End processes together: SIGTERM, and SIGKILL for those that run after `grace` seconds."""
    running = [process for process in processes if process.alive()]
    for process in running if grace > 0 else ():
        process.signal(signal.SIGTERM)
    wait_ended(running, grace)
    for process in running:
        process.signal(signal.SIGKILL)
    wait_ended(running, 5.0)


def wait_ended(processes: Iterable[Process], seconds: float) -> bool:
    """Wait until all have ended; False when some still run after `seconds`."""
    deadline = time.monotonic() + seconds
    processes = list(processes)
    while left := [process for process in processes if process.alive()]:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    for process in processes:
        reap(process.pid)
    return not left


def marked(prefix: str) -> list[Process]:
    """Processes of this user whose mark begins with `prefix`, whatever session they are in."""
    wanted = f"{MARK}={prefix}".encode()
    found: list[Process] = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue
        if any(variable.startswith(wanted) for variable in environment.split(b"\0")):
            begun = started(int(entry))
            if begun is not None:
                found.append(Process("", int(entry), begun))
    return found


def kill_marked(prefix: str, seconds: float = 5.0) -> int:
    """SIGKILL everything whose mark begins with `prefix`; returns how many processes there were."""
    deadline, killed = time.monotonic() + seconds, set[Process]()
    while (found := marked(prefix)) and time.monotonic() < deadline:
        for process in found:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        killed.update(found)
        time.sleep(0.005)
    return len(killed)


class Registry:
    """The processes of a cluster, in a file: so that `down` finds them after any kind of end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Process]:
        """All processes that were added; none when there is no file, or a broken one."""
        try:
            return [Process(**entry) for entry in json.loads(self.path.read_text())]
        except (OSError, ValueError, TypeError):
            return []

    def add(self, process: Process) -> Process:
        """Remember a process, instead of an earlier one of its name."""
        kept = [entry for entry in self.read() if entry.name != process.name]
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps([asdict(entry) for entry in [*kept, process]], indent=1))
        temporary.replace(self.path)
        return process
