"""Rank 0's end of the plan channel: through memory to the ranks of its pod, over TCP to those of others."""

from __future__ import annotations

from pathlib import Path

from mizzen.core.step_plan import StepPlan
from mizzen.server.config import EngineConfig
from mizzen.server.nodes.group import explain_port_errors
from mizzen.server.ranks.links import RankLinks
from mizzen.wire.curve_keys import find_pair
from mizzen.wire.ranks.plan_ring import RingWriter
from mizzen.wire.ranks.plan_tcp import PlanServer


class PlanChannel:
    """Hands plans to all other ranks. Used from one thread."""

    def __init__(self, ring: RingWriter | None, server: PlanServer | None) -> None:
        self._ring = ring
        self._server = server

    def wait_for_ranks(self, seconds: float) -> None:
        """Wait until ranks of other pods are there.

        Raises:
            PlanChannelStalled: one did not come in time.
        """
        if self._server:
            self._server.wait(seconds)

    def send(self, plan: StepPlan) -> None:
        """Hand a plan to all; first to those that it takes longest to.

        Raises:
            PlanChannelStalled: one takes no plans.
            PlanChannelBroken: one is gone, or has come again.
        """
        if self._server:
            self._server.send(plan)
        if self._ring:
            self._ring.send(plan)

    def end(self) -> None:
        """Tell all that nothing more comes, and wait until those of other pods know."""
        if self._ring:
            self._ring.end()
        if self._server:
            self._server.end()
            self._server.close()


def open_plan_channel(config: EngineConfig, links: RankLinks) -> PlanChannel:
    """Open the channel to the ranks of a configuration.

    Raises:
        ValueError: the endpoint cannot be used, or only with keys.
    """
    local = config.local_ranks
    ring = RingWriter(links.ring) if local > 1 else None
    if not links.plan_endpoint:
        return PlanChannel(ring, None)
    keys = (
        find_pair(Path(config.keys), "engine", links.public_key) if config.keys and links.public_key else None
    )
    with explain_port_errors(config.ranks_port):
        return PlanChannel(ring, PlanServer(links.plan_endpoint, keys, range(local, config.tensor)))
