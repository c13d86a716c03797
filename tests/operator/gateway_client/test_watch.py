"""What the operator hears from gateways: at once when it changes, and nothing false when they fail."""

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
    """One gateway's admin API; `say` changes what it serves."""

    def __init__(self, address: str) -> None:
        self.pod = GatewayPod("gateway", address, ready=True)
        self.serving: set[str] = set()
        self.waiting = 0
        self.problem = ""
        self.asked = 0
        self._changed = asyncio.Condition()
        app = web.Application()
        app.router.add_get("/admin/engines", self._engines)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, self.pod.address, ADMIN_PORT).start()

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def say(self, *serving: str, waiting: int = 0, problem: str = "") -> None:
        async with self._changed:
            self.serving, self.waiting, self.problem = set(serving), waiting, problem
            self._changed.notify_all()

    @property
    def version(self) -> str:
        return f"{'.'.join(sorted(self.serving))}-{self.waiting > 0}-{self.problem}"

    async def _engines(self, request: web.Request) -> web.Response:
        self.asked += 1
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
    for one in started:
        await one.start()
    yield started
    for one in started:
        await one.stop()


@pytest.fixture
async def listener() -> AsyncIterator[GatewayWatch]:
    one = GatewayWatch(Metrics())
    yield one
    await one.close()


async def heard(listener: GatewayWatch) -> asyncio.Queue[ServiceKey]:
    news: asyncio.Queue[ServiceKey] = asyncio.Queue()
    listener.on_change = news.put_nowait
    return news


async def ask(listener: GatewayWatch, gateways: list[Gateway], token: str = "token") -> Any:
    async with asyncio.timeout(60):
        return await listener.routing_state([one.pod for one in gateways], token, KEY)


async def test_a_change_is_heard_at_once_and_asked_for_once(
    gateways: list[Gateway], listener: GatewayWatch
) -> None:
    news = await heard(listener)
    for one in gateways:
        await one.say("a", "b")
    first = await ask(listener, gateways)
    assert (first.ready_gateways, first.reporting_gateways, first.routed_by_all) == (2, 2, {"a", "b"})
    assert news.empty()
    await gateways[1].say("a")
    assert await asyncio.wait_for(news.get(), 60) == KEY
    second = await ask(listener, gateways)
    assert (second.routed_by_all, second.routed_by_some) == ({"a"}, {"a", "b"})
    assert not listener.holds_requests(KEY)
    await gateways[0].say("a", "b", waiting=2)
    await asyncio.wait_for(news.get(), 60)
    assert listener.holds_requests(KEY)
    for _ in range(20):
        await ask(listener, gateways)
    assert sum(one.asked for one in gateways) <= 6  # two at first, one kept at each, one after each change
    tables = await listener.fetch_tables(KEY)
    assert tables is not None and [table["waiting"] for table in tables] == [2, 0]


async def test_why_a_gateway_does_not_route_is_heard(gateways: list[Gateway], listener: GatewayWatch) -> None:
    news = await heard(listener)
    await gateways[0].say("a")
    assert (await ask(listener, gateways)).problems == {}
    for number, problem in ((0, "protocol 3"), (1, "keys"), (0, "protocol 4")):
        await gateways[number].say("a", problem=problem)
        assert await asyncio.wait_for(news.get(), 60) == KEY
        heard_now = (await ask(listener, gateways)).problems
        assert heard_now == {"other": "protocol 3" if (number, problem) == (0, "protocol 3") else "keys"}
    await gateways[1].say("a")
    await asyncio.wait_for(news.get(), 60)
    assert (await ask(listener, gateways)).problems == {"other": "protocol 4"}


async def test_a_gateway_that_is_gone_acknowledges_nothing(
    gateways: list[Gateway], listener: GatewayWatch
) -> None:
    news = await heard(listener)
    for one in gateways:
        await one.say("a")
    assert (await ask(listener, gateways)).routed_by_all == {"a"}
    await gateways[1].stop()
    await asyncio.wait_for(news.get(), 60)
    gone = await ask(listener, gateways)
    assert (gone.ready_gateways, gone.reporting_gateways, gone.routed_by_all, gone.routed_by_some) == (
        2,
        1,
        frozenset(),
        {"a"},
    )
    assert await listener.fetch_tables(KEY) is None
    assert (await ask(listener, gateways[:1])).routed_by_all == {"a"}  # its pod is no longer ready


async def test_a_token_that_is_refused_is_told(gateways: list[Gateway], listener: GatewayWatch) -> None:
    answer = await ask(listener, gateways, "wrong")
    assert (answer.token_refused, answer.reporting_gateways, answer.routed_by_some) == (True, 0, frozenset())


async def test_who_is_forgotten_is_asked_no_more(gateways: list[Gateway], listener: GatewayWatch) -> None:
    news = await heard(listener)
    await ask(listener, gateways)
    listener.forget(KEY)
    await asyncio.sleep(0)
    await gateways[0].say("a")
    assert await listener.fetch_tables(KEY) == []
    assert news.empty()
