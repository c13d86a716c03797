# SPDX-License-Identifier: Apache-2.0
"""The watch of gateways reports routing changes at once, and reports no wrong state if gateways fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.labels import ADMIN_PORT
from mizzen_operator.gateway_client.watch import GatewayWatch
from mizzen_operator.metrics import Metrics
from mizzen_operator.pods.observe import GatewayPod

KEY = ServiceKey("llm", "demo")
ADDRESSES = ("127.141.3.1", "127.141.3.2")


class Gateway:
    """Fake admin API of one gateway; `set_state` changes its report, and `requests` counts requests."""

    def __init__(self, address: str) -> None:
        self.pod = GatewayPod("gateway", address, ready=True)
        self.serving: set[str] = set()
        self.waiting = 0
        self.problem = ""
        self.requests = 0
        self._changed = asyncio.Condition()
        app = web.Application()
        app.router.add_get("/admin/engines", self._engines)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, self.pod.address, ADMIN_PORT).start()

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def set_state(self, *serving: str, waiting: int = 0, problem: str = "") -> None:
        async with self._changed:
            self.serving, self.waiting, self.problem = set(serving), waiting, problem
            self._changed.notify_all()

    @property
    def version(self) -> str:
        return f"{'.'.join(sorted(self.serving))}-{self.waiting > 0}-{self.problem}"

    async def _engines(self, request: web.Request) -> web.Response:
        self.requests += 1
        if request.headers["Authorization"] != "Bearer token":
            return web.Response(status=401)
        assert request.query["service"] == "demo"
        if "wait" in request.query:
            async with self._changed:
                await self._changed.wait_for(lambda: self.version != request.query["version"])
        engines = [{"uid": uid, "state": "serving"} for uid in self.serving]
        engines.append({"uid": "other", "state": "connecting", "problem": self.problem})
        return web.json_response({"version": self.version, "waiting": self.waiting, "engines": engines})


@pytest.fixture
async def gateways() -> AsyncIterator[list[Gateway]]:
    started = [Gateway(address) for address in ADDRESSES]
    for gateway in started:
        await gateway.start()
    yield started
    for gateway in started:
        await gateway.stop()


@pytest.fixture
async def listener() -> AsyncIterator[GatewayWatch]:
    watch = GatewayWatch(Metrics())
    yield watch
    await watch.close()


async def record_changes(listener: GatewayWatch) -> asyncio.Queue[ServiceKey]:
    changed_keys: asyncio.Queue[ServiceKey] = asyncio.Queue()
    listener.on_change = changed_keys.put_nowait
    return changed_keys


async def read_state(listener: GatewayWatch, gateways: list[Gateway], token: str = "token") -> Any:
    async with asyncio.timeout(60):
        return await listener.routing_state([gateway.pod for gateway in gateways], token, KEY)


async def test_a_change_is_reported_at_once_with_one_request_per_change(
    gateways: list[Gateway], listener: GatewayWatch
) -> None:
    changed_keys = await record_changes(listener)
    for gateway in gateways:
        await gateway.set_state("a", "b")
    first = await read_state(listener, gateways)
    assert (first.ready_gateways, first.reporting_gateways, first.routed_by_all) == (2, 2, {"a", "b"})
    assert changed_keys.empty()
    await gateways[1].set_state("a")
    assert await asyncio.wait_for(changed_keys.get(), 60) == KEY
    second = await read_state(listener, gateways)
    assert (second.routed_by_all, second.routed_by_some) == ({"a"}, {"a", "b"})
    assert not listener.holds_requests(KEY)
    await gateways[0].set_state("a", "b", waiting=2)
    await asyncio.wait_for(changed_keys.get(), 60)
    assert listener.holds_requests(KEY)
    for _ in range(20):
        await read_state(listener, gateways)
    # Two first requests, one pending request at each gateway, and one after each change.
    assert sum(gateway.requests for gateway in gateways) <= 6
    tables = await listener.fetch_tables(KEY)
    assert tables is not None and [table["waiting"] for table in tables] == [2, 0]


async def test_a_change_of_a_routing_problem_is_reported(
    gateways: list[Gateway], listener: GatewayWatch
) -> None:
    changed_keys = await record_changes(listener)
    await gateways[0].set_state("a")
    assert (await read_state(listener, gateways)).problems == {}
    for number, problem in ((0, "protocol 3"), (1, "keys"), (0, "protocol 4")):
        await gateways[number].set_state("a", problem=problem)
        assert await asyncio.wait_for(changed_keys.get(), 60) == KEY
        problems = (await read_state(listener, gateways)).problems
        assert problems == {"other": "protocol 3" if (number, problem) == (0, "protocol 3") else "keys"}
    await gateways[1].set_state("a")
    await asyncio.wait_for(changed_keys.get(), 60)
    assert (await read_state(listener, gateways)).problems == {"other": "protocol 4"}


async def test_a_stopped_gateway_counts_as_routing_to_no_engine(
    gateways: list[Gateway], listener: GatewayWatch
) -> None:
    changed_keys = await record_changes(listener)
    for gateway in gateways:
        await gateway.set_state("a")
    assert (await read_state(listener, gateways)).routed_by_all == {"a"}
    await gateways[1].stop()
    await asyncio.wait_for(changed_keys.get(), 60)
    gone = await read_state(listener, gateways)
    assert (gone.ready_gateways, gone.reporting_gateways, gone.routed_by_all, gone.routed_by_some) == (
        2,
        1,
        frozenset(),
        {"a"},
    )
    assert await listener.fetch_tables(KEY) is None
    assert (await read_state(listener, gateways[:1])).routed_by_all == {
        "a"
    }  # its pod is no longer ready, so it no longer counts


async def test_a_refused_token_is_reported(gateways: list[Gateway], listener: GatewayWatch) -> None:
    answer = await read_state(listener, gateways, "wrong")
    assert (answer.token_refused, answer.reporting_gateways, answer.routed_by_some) == (True, 0, frozenset())


async def test_gateways_of_a_forgotten_service_are_not_watched(
    gateways: list[Gateway], listener: GatewayWatch
) -> None:
    changed_keys = await record_changes(listener)
    await read_state(listener, gateways)
    listener.forget(KEY)
    await asyncio.sleep(0)
    await gateways[0].set_state("a")
    assert await listener.fetch_tables(KEY) == []
    assert changed_keys.empty()
