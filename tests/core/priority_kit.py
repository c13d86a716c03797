"""Priorities: who goes first, who makes room, who stays in the cache, and that nobody starves."""

from __future__ import annotations

import dataclasses

from test_scheduler import BASE
from world import World


def world(**changes: object) -> World:
    return World(dataclasses.replace(BASE, policy="priority", **changes))  # type: ignore[arg-type]


def step(here: World, times: int) -> None:
    for _ in range(times):
        if here.launch() is None or len(here.flying) >= here.config.steps_in_flight:
            here.collect()
