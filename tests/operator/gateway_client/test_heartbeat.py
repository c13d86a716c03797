"""Gateways that hang are noticed, and no others: real sockets, and a gateway process that is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from mizzen.gateway.telemetry.ping import PingProtocol
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.labels import ADMIN_PORT
from mizzen_operator.gateway_client.heartbeat import HeartbeatMonitor
from mizzen_operator.gateway_client.routing_table import RoutingState
from mizzen_operator.gateway_client.watch import GatewayWatch
from mizzen_operator.metrics import Metrics
from mizzen_operator.pods.observe import GatewayPod
from ports import free_ports

ADDRESS = "127.143.7.1"
KEY = ServiceKey("llm", "demo")


class Watched:
    """Heartbeats of one address; `lives` is what a second look says."""

    def __init__(self) -> None:
        self.lives = False
        self.doubts = 0
        self.changes: asyncio.Queue[str] = asyncio.Queue()
        self.beats = HeartbeatMonitor(0, self._confirm, self.changes.put_nowait)
        self.transport: Any = None

    async def _confirm(self, address: str) -> bool:
        self.doubts += 1
        return self.lives

    async def answer(self) -> None:
        loop = asyncio.get_running_loop()
        port = self.beats._port or 0
        self.transport, _ = await loop.create_datagram_endpoint(PingProtocol, local_addr=(ADDRESS, port))
        self.beats._port = self.transport.get_extra_info("sockname")[1]

    async def next(self) -> str:
        async with asyncio.timeout(60):
            return await self.changes.get()


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    one = Watched()
    await one.answer()
    yield one
    await one.beats.close()
    await one.beats.close()  # as whoever ends twice does
    one.transport.close()


async def heard(watched: Watched) -> None:
    async with asyncio.timeout(60):
        while not watched.beats._gateways[ADDRESS].replied_at:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_one_that_stops_answering_is_silent_until_it_answers_again(watched: Watched) -> None:
    watched.beats.add(ADDRESS)
    await heard(watched)
    assert not watched.beats.is_hung(ADDRESS)
    watched.transport.close()
    assert await watched.next() == ADDRESS
    assert watched.beats.is_hung(ADDRESS) and watched.doubts >= 1
    await watched.answer()
    assert await watched.next() == ADDRESS
    assert not watched.beats.is_hung(ADDRESS)


async def test_lost_datagrams_alone_make_nobody_silent(watched: Watched) -> None:
    watched.lives = True
    watched.beats.add(ADDRESS)
    await heard(watched)
    watched.transport.close()
    async with asyncio.timeout(60):
        while not watched.doubts:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    watched.lives = False  # it counts no more: datagrams have to come back first
    assert not watched.beats.is_hung(ADDRESS)
    await asyncio.sleep(0)
    assert watched.beats._gateways[ADDRESS].replied_at == 0


async def test_one_is_asked_as_soon_as_it_is_known(watched: Watched) -> None:
    """It may hang before its turn comes."""
    watched.beats.add(ADDRESS)
    watched.beats._task.cancel()  # type: ignore[union-attr]
    await heard(watched)


async def test_one_that_never_answered_is_not_judged(watched: Watched) -> None:
    watched.transport.close()
    watched.beats.add(ADDRESS)
    await asyncio.sleep(2.5)
    assert watched.doubts == 0 and not watched.beats.is_hung(ADDRESS)


async def test_an_address_is_asked_as_long_as_anybody_uses_it(watched: Watched) -> None:
    watched.beats.add(ADDRESS)
    watched.beats.add(ADDRESS)
    watched.beats.remove(ADDRESS)
    await heard(watched)
    watched.beats.remove(ADDRESS)
    assert not watched.beats.is_hung(ADDRESS) and not watched.beats._gateways


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A gateway process whose engine is nowhere."""
    (tmp_path / "token").write_text("token")
    options = {
        "served-name": "demo",
        "host": ADDRESS,
        "port": free_ports(ADDRESS),
        "admin-host": ADDRESS,
        "admin-port": ADMIN_PORT,
        "admin-token-file": tmp_path / "token",
        "engine": f"ipc://{tmp_path}/nowhere",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "mizzen.cli", "gateway", *words], stderr=log)
    yield process
    process.send_signal(signal.SIGCONT)
    process.terminate()
    process.wait(60)


async def test_a_stopped_gateway_is_noticed_though_its_connection_stands(
    gateway: subprocess.Popen[bytes],
) -> None:
    listener = GatewayWatch(Metrics())
    pod = GatewayPod("gateway", ADDRESS, ready=True)

    async def until(stalled: bool) -> RoutingState:
        async with asyncio.timeout(120):
            while True:
                said = await listener.routing_state([pod], "token", KEY)
                known = listener._heartbeats._gateways[ADDRESS].replied_at > 0
                if known and (said.hung == {ADDRESS}) == stalled and bool(said.reporting_gateways) != stalled:
                    return said
                await asyncio.sleep(0.05)

    try:
        await until(stalled=False)
        told: asyncio.Queue[ServiceKey] = asyncio.Queue()
        listener.on_change = told.put_nowait
        os.kill(gateway.pid, signal.SIGSTOP)
        assert await asyncio.wait_for(told.get(), 60) == KEY
        said = await until(stalled=True)
        assert (said.ready_gateways, said.reporting_gateways, said.routed_by_all) == (1, 0, frozenset())
        os.kill(gateway.pid, signal.SIGCONT)
        await until(stalled=False)
    finally:
        await listener.close()
