# SPDX-License-Identifier: Apache-2.0
"""The controller: the order in which a new leader reconciles services, and the end of its workers."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from mizzen_operator.api import labels
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.store import ObjectName
from mizzen_operator.manager.controller import RECENT_SECONDS, Controller
from mizzen_operator.metrics import Metrics
from mizzen_operator.reconciler.reconciler import ReconcileResult

SERVICES = 20


class FakeCluster:
    """Fake API server with services, and fake reconciler that records the names of reconciled services.

    Service 7 is the only service whose spec has changed since its last reconcile.
    """

    def __init__(self) -> None:
        self.reconciled: list[str] = []
        self.all_reconciled = asyncio.Event()

    async def list(self, *_: Any) -> list[dict[str, Any]]:
        return [
            {
                "metadata": {"namespace": "n", "name": str(number), "generation": 2 if number == 7 else 1},
                "status": {"observedGeneration": 1},
            }
            for number in range(SERVICES)
        ]

    async def reconcile(self, key: ServiceKey) -> ReconcileResult:
        self.reconciled.append(key.name)
        if len(self.reconciled) == SERVICES:
            self.all_reconciled.set()
        return ReconcileResult()

    async def other_api_keys(self) -> list[ServiceKey]:
        return []


async def test_a_new_leader_begins_with_recently_changed_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """Service 13 and a pod of service 11 changed while no replica led; service 3 changed long before."""
    fake, now = FakeCluster(), 1000.0
    monkeypatch.setattr("mizzen_operator.manager.controller.time.monotonic", lambda: now)
    untyped = cast(Any, fake)
    controller = Controller(untyped, untyped, OperatorConfig(workers=1), Metrics())
    controller.on_object_changed(labels.KIND, ObjectName("n", "3"), {})
    now += RECENT_SECONDS + 1
    controller.on_object_changed("Pod", ObjectName("n", "11-0-0"), {labels.SERVICE: "11"})
    controller.on_object_changed(labels.KIND, ObjectName("n", "13"), {})
    stop = asyncio.Event()
    work = asyncio.create_task(controller.run(stop))
    async with asyncio.timeout(60):
        await fake.all_reconciled.wait()
        stop.set()
        await work
    assert sorted(fake.reconciled[:3]) == ["11", "13", "7"]
    assert sorted(fake.reconciled, key=int) == [str(number) for number in range(SERVICES)]


async def test_the_controller_ends_if_its_workers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a leader that reconciles nothing would hold the Lease forever."""
    fake = cast(Any, FakeCluster())
    monkeypatch.setattr(
        "mizzen_operator.manager.controller.WorkQueue.get", AsyncMock(side_effect=RuntimeError("broken"))
    )
    async with asyncio.timeout(60):
        with pytest.raises(ExceptionGroup, match="TaskGroup"):
            await Controller(fake, fake, OperatorConfig(workers=1), Metrics()).run(asyncio.Event())


async def test_no_reconcile_begins_once_the_controller_is_stopping() -> None:
    """Reconciles that keep enqueueing further services must not delay the handover to the next leader."""
    stop, begun, reconciled = asyncio.Event(), asyncio.Event(), list[str]()

    class Restless(FakeCluster):
        async def list(self, *_: Any) -> list[dict[str, Any]]:
            return (await super().list())[:1]

        async def reconcile(self, key: ServiceKey) -> ReconcileResult:
            reconciled.append(key.name)
            begun.set()
            await stop.wait()
            await asyncio.sleep(0)
            return ReconcileResult(
                also_enqueue=(ServiceKey("n", f"{key.name}, again"),) if len(reconciled) < 100 else ()
            )

    fake = cast(Any, Restless())
    work = asyncio.create_task(Controller(fake, fake, OperatorConfig(workers=2), Metrics()).run(stop))
    async with asyncio.timeout(60):
        await begun.wait()
        stop.set()
        await work
    assert reconciled == ["0"]
