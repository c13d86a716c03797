"""What hangs for one namespace's services keeps no other's from being scaled."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import Mock

import pytest

from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.types import Autoscaling
from mizzen_operator.autoscaling.autoscaler import MAX_CONCURRENT_PER_NAMESPACE, Autoscaler
from mizzen_operator.metrics import Metrics

HUNG = [ServiceKey("hung", str(number)) for number in range(2 * MAX_CONCURRENT_PER_NAMESPACE)]
"""More than are decided on at once, each by a webhook that does not answer."""
ONES = [ServiceKey("well", "one"), ServiceKey("well", "two")]


class Decisions:
    """What stands for decisions: those on services of one namespace never come."""

    def __init__(self) -> None:
        self.made: list[ServiceKey] = []
        self.under_way: set[ServiceKey] = set()

    async def decide(self, key: ServiceKey) -> None:
        assert key not in self.under_way
        self.under_way.add(key)
        if key in HUNG:
            await asyncio.Event().wait()
        self.under_way.discard(key)
        self.made.append(key)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def test_a_request_wakes_a_service_whatever_hangs_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mizzen_operator.autoscaling.autoscaler.PERIOD_SECONDS", 600.0)
    decisions, listener = Decisions(), Mock()
    scaler = Autoscaler(cast(Any, None), listener, Metrics(), Mock())
    monkeypatch.setattr(scaler, "_decide", decisions.decide)
    for key in (*HUNG, *ONES):
        scaler.observe_service(key, cast(Autoscaling, object()))
    work = asyncio.create_task(scaler.run())
    for key in HUNG:
        scaler.decide_now(key)
    await until(lambda: len(decisions.under_way) == MAX_CONCURRENT_PER_NAMESPACE)
    expected: list[ServiceKey] = []
    for key in (ONES[0], ONES[0], ONES[1]):
        expected.append(key)
        scaler.decide_now(key)
        await until(lambda: decisions.made == expected)
        scaler.decide_now(HUNG[0])
    assert len(decisions.under_way) == MAX_CONCURRENT_PER_NAMESPACE
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


async def test_what_is_due_again_meanwhile_is_decided_on_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mizzen_operator.autoscaling.autoscaler.PERIOD_SECONDS", 600.0)
    made, go_on = list[ServiceKey](), asyncio.Event()

    async def decide(key: ServiceKey) -> None:
        made.append(key)
        await go_on.wait()

    scaler = Autoscaler(cast(Any, None), Mock(), Metrics(), Mock())
    monkeypatch.setattr(scaler, "_decide", decide)
    scaler.observe_service(ONES[0], cast(Autoscaling, object()))
    work = asyncio.create_task(scaler.run())
    scaler.decide_now(ONES[0])
    await until(lambda: len(made) == 1)
    scaler.decide_now(ONES[0])
    await asyncio.sleep(0.01)
    assert len(made) == 1
    go_on.set()
    await until(lambda: len(made) == 2)
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
