# SPDX-License-Identifier: Apache-2.0
"""Start, signal and reap rank processes; used by the supervisor."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys

from mizzen.server.config import EngineConfig
from mizzen.server.ranks.links import RankLinks
from mizzen.server.serving_loop import ControlCommand

KILL_SECONDS = 5.0
EXIT_SECONDS = 2.0
"""Maximum time in seconds between a rank's report that it failed and its exit."""


class RankProcess:
    """Process of one rank, with the write end of its control pipe."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], control: int) -> None:
        self.rank = rank
        self.process = process
        self.code: int | None = None
        """Exit code; negative if a signal killed the process, None while the process runs."""
        self._control = control

    def send_command(self, command: ControlCommand) -> None:
        """Send a command to the rank; do nothing if it has exited."""
        try:
            os.write(self._control, command.value)
        except BrokenPipeError:
            pass

    def signal(self, number: int) -> None:
        """Send a signal to the rank; do nothing if it has exited."""
        if self.code is None:
            self.process.send_signal(number)

    def wait_for_exit(self) -> int | None:
        """Wait at most `EXIT_SECONDS` until a rank that has reported its failure exits; return its code."""
        if self.code is None:
            try:
                self.code = self.process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                pass
        return self.code

    def kill(self) -> None:
        """Kill the process, wait at most `KILL_SECONDS` for its exit, and close the control pipe."""
        if self.code is None:
            self.process.kill()
            try:
                self.code = self.process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                pass  # in an uninterruptible system call; the process exits when the call returns
        os.close(self._control)

    def describe_exit(self) -> str:
        """Return a description of the rank's unexpected exit."""
        rank = f"rank {self.rank} (process {self.process.pid})"
        if self.code is None or self.code >= 0:
            return f"{rank} exited unexpectedly with code {self.code}"
        name = signal.Signals(-self.code).name
        hint = "; out of memory, or killed from outside" if -self.code == signal.SIGKILL else ""
        return f"{rank} was killed by signal {-self.code} ({name}{hint})"


def spawn_rank(
    module: str,
    rank: int,
    config: EngineConfig,
    block: int,
    links: RankLinks | None = None,
    *,
    traces: int | None = None,
) -> RankProcess:
    """Start the process of a rank, which inherits the status block, a control pipe and the links.

    Args:
        module: Module that the process runs.
        rank: Rank of the process.
        config: Configuration of the engine.
        block: File descriptor of the status blocks.
        links: Links to the other ranks; None if there are no other ranks.
        traces: File descriptor to which rank 0 writes the records of traced requests; None if tracing is off.
    """
    read, write = os.pipe()
    command = [sys.executable, "-P", "-m", module, "--rank", str(rank), "--status-fd", str(block)]
    command += ["--control-fd", str(read), "--parent", str(os.getpid())]
    command += ["--config", json.dumps(dataclasses.asdict(config))]
    inherited = {block, read}
    if links is not None:
        command += ["--links", links.to_json()]
        inherited |= set(links.descriptors)
    if traces is not None:
        command += ["--traces-fd", str(traces)]
        inherited.add(traces)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=sorted(inherited))
    finally:
        os.close(read)
    return RankProcess(rank, process, write)


def kill_ranks(ranks: list[RankProcess]) -> None:
    """Kill all ranks; signal all of them before waiting for any, because exits may be slow."""
    for rank in ranks:
        rank.signal(signal.SIGKILL)
    for rank in ranks:
        rank.kill()


def reap_ranks(ranks: list[RankProcess]) -> None:
    """Record the exit codes of ranks that have exited; if this process has id 1, also reap orphans."""
    for rank in ranks:
        if rank.code is None:
            rank.code = rank.process.poll()
    if os.getpid() == 1:
        _reap_orphans({rank.process.pid for rank in ranks})


def _reap_orphans(own_pids: set[int]) -> None:
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        # The `Popen` object of a rank reaps it at the next poll.
        if ended is None or ended.si_pid in own_pids:
            return
        os.waitpid(ended.si_pid, 0)
