# SPDX-License-Identifier: Apache-2.0
"""The heartbeat monitor detects hung gateways and no others: real sockets, and a stopped gateway process."""

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


class MonitoredAddress:
    """A monitored address that answers pings; `confirms` is the result of the confirming HTTP request."""

    def __init__(self) -> None:
        self.confirms = False
        self.confirmations = 0
        self.changes: asyncio.Queue[str] = asyncio.Queue()
        self.monitor = HeartbeatMonitor(0, self._confirm, self.changes.put_nowait)
        self.transport: Any = None

    async def _confirm(self, address: str) -> bool:
        self.confirmations += 1
        return self.confirms

    async def answer(self) -> None:
        loop = asyncio.get_running_loop()
        port = self.monitor._port or 0
        self.transport, _ = await loop.create_datagram_endpoint(PingProtocol, local_addr=(ADDRESS, port))
        self.monitor._port = self.transport.get_extra_info("sockname")[1]

    async def next(self) -> str:
        async with asyncio.timeout(60):
            return await self.changes.get()


@pytest.fixture
async def monitored() -> AsyncIterator[MonitoredAddress]:
    address = MonitoredAddress()
    await address.answer()
    yield address
    await address.monitor.close()
    await address.monitor.close()  # a second close has no effect
    address.transport.close()


async def wait_for_reply(monitored: MonitoredAddress) -> None:
    async with asyncio.timeout(60):
        while not monitored.monitor._gateways[ADDRESS].replied_at:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_an_address_is_hung_from_missing_replies_until_the_next_reply(
    monitored: MonitoredAddress,
) -> None:
    monitored.monitor.add(ADDRESS)
    await wait_for_reply(monitored)
    assert not monitored.monitor.is_hung(ADDRESS)
    monitored.transport.close()
    assert await monitored.next() == ADDRESS
    assert monitored.monitor.is_hung(ADDRESS) and monitored.confirmations >= 1
    await monitored.answer()
    assert await monitored.next() == ADDRESS
    assert not monitored.monitor.is_hung(ADDRESS)


async def test_lost_datagrams_alone_do_not_mark_an_address_as_hung(monitored: MonitoredAddress) -> None:
    monitored.confirms = True
    monitored.monitor.add(ADDRESS)
    await wait_for_reply(monitored)
    monitored.transport.close()
    async with asyncio.timeout(60):
        while not monitored.confirmations:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    monitored.confirms = False  # no effect until datagrams are answered again
    assert not monitored.monitor.is_hung(ADDRESS)
    await asyncio.sleep(0)
    assert monitored.monitor._gateways[ADDRESS].replied_at == 0


async def test_a_new_address_is_pinged_at_once(monitored: MonitoredAddress) -> None:
    """The first ping must not wait, because only a gateway that has replied before can be found to hang."""
    monitored.monitor.add(ADDRESS)
    monitored.monitor._task.cancel()  # type: ignore[union-attr]
    await wait_for_reply(monitored)


async def test_an_address_that_never_replied_is_not_hung(monitored: MonitoredAddress) -> None:
    monitored.transport.close()
    monitored.monitor.add(ADDRESS)
    await asyncio.sleep(2.5)
    assert monitored.confirmations == 0 and not monitored.monitor.is_hung(ADDRESS)


async def test_an_address_is_monitored_until_it_is_removed_as_often_as_added(
    monitored: MonitoredAddress,
) -> None:
    monitored.monitor.add(ADDRESS)
    monitored.monitor.add(ADDRESS)
    monitored.monitor.remove(ADDRESS)
    await wait_for_reply(monitored)
    monitored.monitor.remove(ADDRESS)
    assert not monitored.monitor.is_hung(ADDRESS) and not monitored.monitor._gateways


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a gateway process; its engine does not exist."""
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


async def test_a_stopped_gateway_process_is_hung_although_its_connection_is_open(
    gateway: subprocess.Popen[bytes],
) -> None:
    listener = GatewayWatch(Metrics())
    pod = GatewayPod("gateway", ADDRESS, ready=True)

    async def until(stalled: bool) -> RoutingState:
        async with asyncio.timeout(120):
            while True:
                state = await listener.routing_state([pod], "token", KEY)
                replied = listener._heartbeats._gateways[ADDRESS].replied_at > 0
                if (
                    replied
                    and (state.hung == {ADDRESS}) == stalled
                    and bool(state.reporting_gateways) != stalled
                ):
                    return state
                await asyncio.sleep(0.05)

    try:
        await until(stalled=False)
        changed_keys: asyncio.Queue[ServiceKey] = asyncio.Queue()
        listener.on_change = changed_keys.put_nowait
        os.kill(gateway.pid, signal.SIGSTOP)
        assert await asyncio.wait_for(changed_keys.get(), 60) == KEY
        state = await until(stalled=True)
        assert (state.ready_gateways, state.reporting_gateways, state.routed_by_all) == (1, 0, frozenset())
        os.kill(gateway.pid, signal.SIGCONT)
        await until(stalled=False)
    finally:
        await listener.close()
