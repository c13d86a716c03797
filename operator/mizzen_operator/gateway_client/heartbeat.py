# SPDX-License-Identifier: Apache-2.0
"""Detects gateways that hang: each gateway gets a UDP ping every second and echoes it. For `watch.py`.

An open HTTP request does not reveal a hang: the kernel keeps the connections of a stopped process. If a
gateway has replied before and then misses two pings, it gets an HTTP request, and counts as hung if that
fails too. So if the network drops datagrams, only this fast detection is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

PERIOD_SECONDS = 1.0
SLICES = 10
"""Number of slices into which each period of PERIOD_SECONDS is divided.

The pings of the gateways are spread over the slices, so that the replies fit into the receive buffer.
"""
HUNG_SECONDS = 2.1
"""Time without a reply after which a gateway gets an HTTP request."""
CONFIRM_SECONDS = 0.5
"""Timeout of the HTTP request that is sent to a gateway whose replies are missing."""
STALL_SECONDS = 0.25
"""Delay of this process's event loop above which missing replies say nothing about the gateways."""


@dataclass(slots=True)
class _GatewayHeartbeat:
    """Heartbeat of one gateway."""

    references: int = 0
    replied_at: float = 0.0
    """Monotonic time of the last reply; 0 before the first reply."""
    hung: bool = False
    confirmation: asyncio.Task[None] | None = None


class HeartbeatMonitor:
    """Pings gateways, and records which of them hang. Gateways are identified by address."""

    def __init__(
        self,
        port: int,
        confirm: Callable[[str], Awaitable[bool]],
        on_change: Callable[[str], None],
    ) -> None:
        """Create a monitor without gateways.

        Args:
            port: port on which all gateways reply.
            confirm: returns whether the gateway at an address answers over HTTP; called when the gateway no
                longer replies to pings.
            on_change: called with the address of a gateway that has begun to hang, or has recovered.
        """
        self._port = port
        self._confirm = confirm
        self._on_change = on_change
        self._nonce = os.urandom(8)
        self._gateways: dict[str, _GatewayHeartbeat] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._task: asyncio.Task[None] | None = None

    def is_hung(self, address: str) -> bool:
        """Return whether a gateway has replied to pings before, and now answers neither pings nor HTTP."""
        gateway = self._gateways.get(address)
        return gateway is not None and gateway.hung

    def add(self, address: str) -> None:
        """Begin to ping a gateway; the pings end after as many calls of `remove` as of `add`."""
        if address not in self._gateways:
            self._gateways[address] = _GatewayHeartbeat()
            self._ping(address)  # at once: a hang is noticed only after the first reply
        self._gateways[address].references += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="heartbeats")

    def remove(self, address: str) -> None:
        """Undo one call of `add`; the last one ends the pings of the gateway."""
        gateway = self._gateways[address]
        gateway.references -= 1
        if not gateway.references:
            del self._gateways[address]
            if gateway.confirmation is not None:
                gateway.confirmation.cancel()

    async def close(self) -> None:
        """Stop all pings; may be called twice."""
        tasks = [
            task
            for task in (self._task, *(gateway.confirmation for gateway in self._gateways.values()))
            if task is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._sockets:
            _, udp_socket = self._sockets.popitem()
            asyncio.get_running_loop().remove_reader(udp_socket)
            udp_socket.close()

    async def _run(self) -> None:
        slice_index, last = 0, time.monotonic()
        while True:
            await asyncio.sleep(PERIOD_SECONDS / SLICES)
            now = time.monotonic()
            late, last = now - last - PERIOD_SECONDS / SLICES, now
            if late > STALL_SECONDS:
                for gateway in self._gateways.values():
                    gateway.replied_at += late if gateway.replied_at else 0.0
            slice_index = (slice_index + 1) % SLICES
            for address in list(self._gateways)[slice_index::SLICES]:
                self._check(address, self._gateways[address], now)

    def _check(self, address: str, gateway: _GatewayHeartbeat, now: float) -> None:
        if (
            gateway.replied_at
            and not gateway.hung
            and gateway.confirmation is None
            and now - gateway.replied_at > HUNG_SECONDS
        ):
            gateway.confirmation = asyncio.create_task(self._confirm_hung(address, gateway))
        self._ping(address)

    def _ping(self, address: str) -> None:
        with contextlib.suppress(OSError):  # a full buffer or a missing route counts as a lost datagram
            self._socket(address).sendto(self._nonce, (address, self._port))

    async def _confirm_hung(self, address: str, gateway: _GatewayHeartbeat) -> None:
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                alive = await self._confirm(address)
        except TimeoutError:
            alive = False
        gateway.confirmation = None
        if alive:  # datagrams are lost, but the gateway works: pings count again after the next reply
            gateway.replied_at = 0.0
        elif time.monotonic() - gateway.replied_at > HUNG_SECONDS:
            gateway.hung = True
            self._on_change(address)

    def _socket(self, address: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        if family not in self._sockets:
            udp_socket = socket.socket(family, socket.SOCK_DGRAM)
            udp_socket.setblocking(False)
            asyncio.get_running_loop().add_reader(udp_socket, self._receive, udp_socket)
            self._sockets[family] = udp_socket
        return self._sockets[family]

    def _receive(self, udp_socket: socket.socket) -> None:
        now = time.monotonic()
        while True:
            try:
                data, (address, *_) = udp_socket.recvfrom(64)
            except OSError:
                return
            gateway = self._gateways.get(address)
            if gateway is None or data != self._nonce:
                continue
            gateway.replied_at = now
            if gateway.hung:
                gateway.hung = False
                self._on_change(address)
