# SPDX-License-Identifier: Apache-2.0
"""Helpers for the tests of priorities: a world with the policy `priority`, and a loop that runs its steps."""

from __future__ import annotations

import dataclasses

from test_scheduler import BASE
from world import World


def make_world(**changes: object) -> World:
    return World(dataclasses.replace(BASE, policy="priority", **changes))  # type: ignore[arg-type]


def step(world: World, times: int) -> None:
    """Launch `times` steps; complete the oldest one whenever `steps_in_flight` steps are in flight."""
    for _ in range(times):
        if world.launch() is None or len(world.inflight) >= world.config.steps_in_flight:
            world.collect()
