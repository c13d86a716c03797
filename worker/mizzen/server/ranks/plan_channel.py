# SPDX-License-Identifier: Apache-2.0
"""Rank 0's end of the plan channel: shared memory to the ranks of its pod, TCP to the ranks of other pods."""

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
    """Rank 0's end of the channel through which it sends step plans to all other ranks. Not thread-safe."""

    def __init__(self, ring: RingWriter | None, server: PlanServer | None) -> None:
        self._ring = ring
        self._server = server

    def wait_for_ranks(self, seconds: float) -> None:
        """Wait until the ranks of other pods are connected.

        Raises:
            PlanChannelStalled: a rank did not connect within `seconds`.
        """
        if self._server:
            self._server.wait(seconds)

    def send(self, plan: StepPlan) -> None:
        """Send a plan to all other ranks, first to the ranks of other pods.

        Raises:
            PlanChannelStalled: a rank has stopped reading plans.
            PlanChannelBroken: a rank is gone, or has lost its connection and reconnected.
        """
        if self._server:
            self._server.send(plan)
        if self._ring:
            self._ring.send(plan)

    def end(self) -> None:
        """Send the end of the plans to all other ranks; wait until it is sent to the ranks of other pods."""
        if self._ring:
            self._ring.end()
        if self._server:
            self._server.end()
            self._server.close()


def open_plan_channel(config: EngineConfig, links: RankLinks) -> PlanChannel:
    """Open rank 0's end of the plan channel.

    Raises:
        ValueError: the endpoint cannot be bound, or it needs keys and none are configured.
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
