# SPDX-License-Identifier: Apache-2.0
"""Scaling decisions that hang in one namespace do not delay scaling decisions in other namespaces."""

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
"""Twice as many services as the autoscaler handles concurrently per namespace.

Every scaling decision for them hangs, as if an admission webhook did not answer.
"""
OTHERS = [ServiceKey("well", "one"), ServiceKey("well", "two")]


class Decisions:
    """Fake scaling decisions; a decision for a service in the namespace `hung` never ends."""

    def __init__(self) -> None:
        self.completed: list[ServiceKey] = []
        self.running: set[ServiceKey] = set()

    async def decide(self, key: ServiceKey) -> None:
        assert key not in self.running
        self.running.add(key)
        if key in HUNG:
            await asyncio.Event().wait()
        self.running.discard(key)
        self.completed.append(key)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def test_a_service_is_scaled_at_once_while_decisions_of_another_namespace_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mizzen_operator.autoscaling.autoscaler.PERIOD_SECONDS", 600.0)
    decisions, listener = Decisions(), Mock()
    scaler = Autoscaler(cast(Any, None), listener, Metrics(), Mock())
    monkeypatch.setattr(scaler, "_decide", decisions.decide)
    for key in (*HUNG, *OTHERS):
        scaler.observe_service(key, cast(Autoscaling, object()))
    work = asyncio.create_task(scaler.run())
    for key in HUNG:
        scaler.decide_now(key)
    await until(lambda: len(decisions.running) == MAX_CONCURRENT_PER_NAMESPACE)
    expected: list[ServiceKey] = []
    for key in (OTHERS[0], OTHERS[0], OTHERS[1]):
        expected.append(key)
        scaler.decide_now(key)
        await until(lambda: decisions.completed == expected)
        scaler.decide_now(HUNG[0])
    assert len(decisions.running) == MAX_CONCURRENT_PER_NAMESPACE
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


async def test_a_decision_that_is_due_during_the_previous_one_follows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mizzen_operator.autoscaling.autoscaler.PERIOD_SECONDS", 600.0)
    completed, resume = list[ServiceKey](), asyncio.Event()

    async def decide(key: ServiceKey) -> None:
        completed.append(key)
        await resume.wait()

    scaler = Autoscaler(cast(Any, None), Mock(), Metrics(), Mock())
    monkeypatch.setattr(scaler, "_decide", decide)
    scaler.observe_service(OTHERS[0], cast(Autoscaling, object()))
    work = asyncio.create_task(scaler.run())
    scaler.decide_now(OTHERS[0])
    await until(lambda: len(completed) == 1)
    scaler.decide_now(OTHERS[0])
    await asyncio.sleep(0.01)
    assert len(completed) == 1
    resume.set()
    await until(lambda: len(completed) == 2)
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
