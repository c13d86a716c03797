# SPDX-License-Identifier: Apache-2.0
"""Start, monitor and stop ranks 1 and up of an engine whose rank 0 runs in this process.

`mizzen.offline` uses it instead of a supervisor.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time

from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.tp_worker import FollowerRanks
from mizzen.engine.loading.placement import rank_placement
from mizzen.parallel.process_group import RankGroup, RanksFailed
from mizzen.server.failed_rank import find_failed_rank
from mizzen.server.metric_catalogue import Phase
from mizzen.server.ranks.heartbeat import HeartbeatReader, HeartbeatWriter
from mizzen.server.ranks.launch_guard import LaunchGuard, arm_exit_alarm
from mizzen.server.ranks.links import create_rank_links
from mizzen.server.ranks.spawn_thread import SpawnThread
from mizzen.server.ranks.stall_detector import StallDetector
from mizzen.server.status_block import StatusReader
from mizzen.wire.ranks.plan_ring import RingWriter

CHECK_SECONDS = 0.05
RANK_DEADLINE_SECONDS = 8.0
STEP_DEADLINE_SECONDS = 120.0
EXIT_SECONDS = 10.0
KILL_SECONDS = 5.0


class LocalRanks:
    """Ranks 1 and up, as child processes of this process. Call `close` after closing the engine."""

    def __init__(self, options: EngineOptions) -> None:
        """Start the ranks, which load their shards concurrently with rank 0.

        Raises:
            ValueError: the engine would span several nodes, or a step's plan does not fit the shared memory.
        """
        if options.nodes > 1:
            raise ValueError(
                f"--nodes {options.nodes} needs `mizzen engine`: only one node is supported here"
            )
        size = options.tensor
        self._options = options
        self._links = create_rank_links(options)
        self._readers = [StatusReader(self._links.status, rank) for rank in range(size)]
        self._heartbeat = HeartbeatWriter(self._links.heartbeats, 0)
        self._heartbeats = HeartbeatReader(self._links.heartbeats, size)
        self._detector = StallDetector(size, RANK_DEADLINE_SECONDS, STEP_DEADLINE_SECONDS, own_rank=0)
        self._checked_at = 0.0
        self._fault: str | None = None
        # The thread that creates this object may end long before the ranks do.
        self._spawn_thread = SpawnThread(lambda: [self._spawn(rank) for rank in range(1, size)])
        self._processes = self._spawn_thread.result
        self._guard = LaunchGuard(lambda: self._find_fault(time.monotonic()))

    def connect_followers(self) -> FollowerRanks:
        """Start rank 0's heartbeat, and return rank 0's connections to the other ranks."""
        self._heartbeat.start()
        self._heartbeat.mark_serving()
        plans = RingWriter(self._links.ring)
        return FollowerRanks(
            join_group=self._join_group,
            plans=plans,
            heartbeat=self._heartbeat,
            raise_if_rank_failed=self.raise_if_failed,
            launch_guard=self._guard,
        )

    def raise_if_failed(self) -> None:
        """Check the other ranks, at most once every `CHECK_SECONDS`.

        Raises:
            RanksFailed: a rank exited or is stuck; all other ranks have been killed.
        """
        now = time.monotonic()
        if now - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = now
        if fault := self._find_fault(now):
            raise RanksFailed(fault)

    def close(self) -> None:
        """Wait for the ranks to exit, as they do once rank 0 ends the plans; kill them after a timeout."""
        self._guard.close()
        self._heartbeat.close()
        deadline = time.monotonic() + EXIT_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
        self._kill()
        self._spawn_thread.close()
        self._links.close_in_rank()

    def _find_fault(self, now: float) -> str | None:
        """Check the other ranks; if one has failed, kill all of them. Return a description of the first
        failure, or None if all ranks are running."""
        # Remember the first fault: it causes all later ones, such as the exits of the killed ranks.
        if self._fault is None:
            self._fault = self._describe_exited_rank() or self._detector.find_fault(
                self._heartbeats.read(), now
            )
            if self._fault:
                self._kill()
                if self._options.device == "cuda":
                    arm_exit_alarm()
        return self._fault

    def _join_group(self) -> RankGroup:
        return RankGroup(rank_placement(self._options, 0, self._links.rendezvous), self.raise_if_failed)

    def _spawn(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "mizzen.server.ranks.follower", "--rank", str(rank)]
        command += ["--parent", str(os.getpid()), "--links", self._links.to_json()]
        command += ["--config", json.dumps(dataclasses.asdict(self._options))]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=self._links.descriptors)

    def _describe_exited_rank(self) -> str | None:
        codes = {
            rank: code
            for rank, process in enumerate(self._processes, 1)
            if (code := process.poll()) is not None
        }
        if not codes:
            return None
        statuses = {rank: self._readers[rank].read() for rank in range(1, len(self._readers))}
        rank = find_failed_rank(codes, statuses)
        if statuses[rank]["phase"] == Phase.FAILED:
            return f"rank {rank} failed: {statuses[rank].text}"
        process = self._processes[rank - 1]
        return f"rank {rank} (process {process.pid}) exited unexpectedly with code {codes[rank]}"

    def _kill(self) -> None:
        alive = [process for process in self._processes if process.poll() is None]
        for process in alive:
            process.kill()
        for process in alive:
            try:
                process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                pass  # in an uninterruptible system call; the process exits when the call returns
