"""Monitor the ranks of a group from the supervisor, through their shared heartbeats."""

from __future__ import annotations

from collections.abc import Sequence

from mizzen.server.config import EngineConfig
from mizzen.server.ranks.heartbeat import HeartbeatReader, RankHeartbeat
from mizzen.server.ranks.links import RankLinks
from mizzen.server.ranks.stall_detector import StallDetector
from mizzen.server.status_block import StatusReader
from mizzen.wire.ranks.node_messages import RankReport


class GroupMonitor:
    """Detects stalled ranks of a group and reports this node's ranks to node 0."""

    def __init__(self, config: EngineConfig, links: RankLinks) -> None:
        """Use the configured deadlines; on CPU a step may take as long as the watchdog allows."""
        ranks, seconds = config.rank_deadline_seconds, config.watchdog_seconds
        steps = min(ranks, seconds) if config.device == "cuda" else seconds
        self._heartbeats = HeartbeatReader(links.heartbeats, links.local_ranks)
        self._detector = StallDetector(config.tensor, ranks, steps)

    def read_own(self) -> list[RankHeartbeat]:
        """Return the heartbeats of this node's ranks."""
        return self._heartbeats.read()

    def find_fault(self, remote: list[RankHeartbeat], now: float) -> str | None:
        """Return a description of the rank, on any node, that stalls the others; None if no rank does."""
        return self._detector.find_fault([*self.read_own(), *remote], now)

    def build_reports(self, readers: Sequence[StatusReader], now: float) -> list[RankReport]:
        """Return the progress of this node's ranks, for node 0."""
        reports: list[RankReport] = []
        for reader, heartbeat in zip(readers, self.read_own(), strict=True):
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
