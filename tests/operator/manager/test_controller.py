"""The loop: what a new leader looks at first."""

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


class Fakes:
    """An API server with services, number 7 of which was changed, and a reconciler that notes its looks."""

    def __init__(self) -> None:
        self.looks: list[str] = []
        self.all_seen = asyncio.Event()

    async def list(self, *_: Any) -> list[dict[str, Any]]:
        return [
            {
                "metadata": {"namespace": "n", "name": str(number), "generation": 2 if number == 7 else 1},
                "status": {"observedGeneration": 1},
            }
            for number in range(SERVICES)
        ]

    async def reconcile(self, key: ServiceKey) -> ReconcileResult:
        self.looks.append(key.name)
        if len(self.looks) == SERVICES:
            self.all_seen.set()
        return ReconcileResult()

    async def other_api_keys(self) -> list[ServiceKey]:
        return []


async def test_a_new_leader_begins_with_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod of 11 has ended, and 13 was changed, while nobody led; what happened to 3 is long ago."""
    fakes, now = Fakes(), 1000.0
    monkeypatch.setattr("mizzen_operator.manager.controller.time.monotonic", lambda: now)
    known = cast(Any, fakes)
    loop = Controller(known, known, OperatorConfig(workers=1), Metrics())
    loop.on_object_changed(labels.KIND, ObjectName("n", "3"), {})
    now += RECENT_SECONDS + 1
    loop.on_object_changed("Pod", ObjectName("n", "11-0-0"), {labels.SERVICE: "11"})
    loop.on_object_changed(labels.KIND, ObjectName("n", "13"), {})
    stop = asyncio.Event()
    work = asyncio.create_task(loop.run(stop))
    async with asyncio.timeout(60):
        await fakes.all_seen.wait()
        stop.set()
        await work
    assert sorted(fakes.looks[:3]) == ["11", "13", "7"]
    assert sorted(fakes.looks, key=int) == [str(number) for number in range(SERVICES)]


async def test_what_begins_no_more_looks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that looks at nothing would hold the Lease for ever."""
    fakes = cast(Any, Fakes())
    monkeypatch.setattr(
        "mizzen_operator.manager.controller.WorkQueue.get", AsyncMock(side_effect=RuntimeError("broken"))
    )
    async with asyncio.timeout(60):
        with pytest.raises(ExceptionGroup, match="TaskGroup"):
            await Controller(fakes, fakes, OperatorConfig(workers=1), Metrics()).run(asyncio.Event())


async def test_no_look_begins_any_more_once_it_is_to_stop() -> None:
    """Looks that ask for others without end keep nobody from taking over."""
    stop, begun, looks = asyncio.Event(), asyncio.Event(), list[str]()

    class Restless(Fakes):
        async def list(self, *_: Any) -> list[dict[str, Any]]:
            return (await super().list())[:1]

        async def reconcile(self, key: ServiceKey) -> ReconcileResult:
            looks.append(key.name)
            begun.set()
            await stop.wait()
            await asyncio.sleep(0)
            return ReconcileResult(
                also_enqueue=(ServiceKey("n", f"{key.name}, again"),) if len(looks) < 100 else ()
            )

    fakes = cast(Any, Restless())
    work = asyncio.create_task(Controller(fakes, fakes, OperatorConfig(workers=2), Metrics()).run(stop))
    async with asyncio.timeout(60):
        await begun.wait()
        stop.set()
        await work
    assert looks == ["0"]
