# SPDX-License-Identifier: Apache-2.0
"""Monitor the ranks of an engine from its supervisor, through the ranks' heartbeats."""

from __future__ import annotations

from collections.abc import Sequence

from mizzen.server.config import EngineConfig
from mizzen.server.ranks.heartbeat import HeartbeatReader, RankHeartbeat
from mizzen.server.ranks.links import RankLinks
from mizzen.server.ranks.stall_detector import StallDetector
from mizzen.server.status_block import StatusReader
from mizzen.wire.ranks.node_messages import RankReport


class GroupMonitor:
    """Finds stalled ranks, and describes the progress of this node's ranks for node 0."""

    def __init__(self, config: EngineConfig, links: RankLinks) -> None:
        """Create a monitor with the deadlines that `config` sets.

        A step may take at most `watchdog_seconds`; on CUDA, also at most `rank_deadline_seconds`.
        """
        ranks, seconds = config.rank_deadline_seconds, config.watchdog_seconds
        steps = min(ranks, seconds) if config.device == "cuda" else seconds
        self._heartbeats = HeartbeatReader(links.heartbeats, links.local_ranks)
        self._detector = StallDetector(config.tensor, ranks, steps)

    def read_own_heartbeats(self) -> list[RankHeartbeat]:
        """Return the heartbeats of this node's ranks."""
        return self._heartbeats.read()

    def find_fault(self, remote: list[RankHeartbeat], now: float) -> str | None:
        """Return a description of a stalled rank on any node, or None.

        Args:
            remote: Heartbeats of other nodes' ranks, in rank order.
            now: Current monotonic time in seconds.
        """
        return self._detector.find_fault([*self.read_own_heartbeats(), *remote], now)

    def build_reports(self, readers: Sequence[StatusReader], now: float) -> list[RankReport]:
        """Return the progress reports of this node's ranks, for node 0.

        Args:
            readers: Readers of the status blocks of this node's ranks, in rank order.
            now: Current monotonic time in seconds.
        """
        reports: list[RankReport] = []
        for reader, heartbeat in zip(readers, self.read_own_heartbeats(), strict=True):
            snapshot = reader.read()
            idle = now - heartbeat.alive if heartbeat.alive else -1.0
            rank = (
                int(snapshot["phase"]),
                snapshot.text,
                idle,
                heartbeat.launched,
                heartbeat.done,
                heartbeat.process,
            )
            reports.append(RankReport(*rank))
        return reports
