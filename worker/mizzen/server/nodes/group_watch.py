"""How far the ranks of a group are, as its supervisor sees it from outside."""

from __future__ import annotations

from collections.abc import Sequence

from mizzen.server.config import EngineConfig
from mizzen.server.ranks.heartbeat import Pulse, PulseReader
from mizzen.server.ranks.links import Links
from mizzen.server.ranks.stall_detector import RankWatch
from mizzen.server.status_block import StatusReader
from mizzen.wire.ranks.node_messages import RankReport


class GroupWatch:
    """Looks after the ranks of a group from outside."""

    def __init__(self, config: EngineConfig, links: Links) -> None:
        """Take the configuration's deadlines; a step on cpu may take as long as the watchdog allows."""
        ranks, seconds = config.rank_deadline_seconds, config.watchdog_seconds
        steps = min(ranks, seconds) if config.device == "cuda" else seconds
        self._pulses = PulseReader(links.pulses, links.size)
        self._watch = RankWatch(config.tensor, ranks, steps)

    def read(self) -> list[Pulse]:
        """Return how far this node's ranks are."""
        return self._pulses.read()

    def look(self, elsewhere: list[Pulse], now: float) -> str | None:
        """Return which rank of all nodes holds up the others, and how, if one does."""
        return self._watch.look([*self.read(), *elsewhere], now)

    def reports(self, readers: Sequence[StatusReader], now: float) -> list[RankReport]:
        """Return how far this node's ranks are, for node 0."""
        found: list[RankReport] = []
        for reader, pulse in zip(readers, self.read(), strict=True):
            snapshot = reader.read()
            idle = now - pulse.alive if pulse.alive else -1.0
            rank = (int(snapshot["phase"]), snapshot.text, idle, pulse.launched, pulse.done, pulse.process)
            found.append(RankReport(*rank))
        return found
