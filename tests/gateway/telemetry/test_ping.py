# SPDX-License-Identifier: Apache-2.0
"""The port that answers pings, tested over real sockets."""

from __future__ import annotations

import asyncio
import socket

import pytest

from mizzen.gateway.telemetry import ping
from ports import free_ports

HOSTS = ("127.143.7.2", "127.143.7.3")


async def test_ping_ports_do_not_answer_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """If ping ports answered each other, one forged datagram would keep two gateways busy forever."""
    port = free_ports(HOSTS[0])
    came: list[bytes] = []
    receive = ping.PingProtocol.datagram_received

    def counted(self: ping.PingProtocol, data: bytes, addr: tuple[str, int]) -> None:
        came.append(data)
        receive(self, data, addr)

    monkeypatch.setattr(ping.PingProtocol, "datagram_received", counted)
    first, second = [await ping.answer_pings(host, port) for host in HOSTS]
    assert first is not None and second is not None
    try:
        first.sendto(b"forged", (HOSTS[1], port))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            asker.setblocking(False)
            loop = asyncio.get_running_loop()
            for _ in range(20):  # enough rounds for an answer to the forged datagram to arrive
                await loop.sock_sendto(asker, b"ping", (HOSTS[1], port))
                assert await asyncio.wait_for(loop.sock_recv(asker, 64), 60) == b"ping"
    finally:
        first.close()
        second.close()
    assert came.count(b"forged") == 1
    assert came.count(b"ping") == 20
