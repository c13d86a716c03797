"""Notices gateways that hang: a datagram a second to each, which it sends back.

A request that waits at a gateway does not tell: the kernel keeps the connection of a process that has
stopped. One that has answered before and then leaves two pings unanswered is asked over HTTP, and counts as
silent when that fails too. So a network that takes no datagrams costs nothing but the sooner notice.
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
"""Parts of all gateways that are asked one after another in a period, so that the answers find room."""
HUNG_SECONDS = 2.1
CONFIRM_SECONDS = 0.5
STALL_SECONDS = 0.25
"""When this process itself is so late, it knows nothing of the others."""


@dataclass(slots=True)
class _GatewayHeartbeat:
    """What is known of one gateway."""

    references: int = 0
    replied_at: float = 0.0
    """When it answered last; 0 before it ever did."""
    hung: bool = False
    confirmation: asyncio.Task[None] | None = None


class HeartbeatMonitor:
    """Asks gateways by their addresses, all at one port."""

    def __init__(
        self,
        port: int,
        confirm: Callable[[str], Awaitable[bool]],
        on_change: Callable[[str], None],
    ) -> None:
        """Ask nobody yet.

        Args:
            port: where all of them answer.
            confirm: tells whether one answers in another way, soon.
            on_change: gets the address of one that is silent, or is heard again.
        """
        self._port = port
        self._confirm = confirm
        self._on_change = on_change
        self._nonce = os.urandom(8)
        self._gateways: dict[str, _GatewayHeartbeat] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._task: asyncio.Task[None] | None = None

    def is_hung(self, address: str) -> bool:
        """Whether a gateway has answered before and does no longer."""
        gateway = self._gateways.get(address)
        return gateway is not None and gateway.hung

    def add(self, address: str) -> None:
        """Ask a gateway, until it is removed as often as it was added."""
        if address not in self._gateways:
            self._gateways[address] = _GatewayHeartbeat()
            self._ping(address)  # at once: before its first answer nobody would notice that it hangs
        self._gateways[address].references += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="heartbeats")

    def remove(self, address: str) -> None:
        """Ask a gateway no more."""
        gateway = self._gateways[address]
        gateway.references -= 1
        if not gateway.references:
            del self._gateways[address]
            if gateway.confirmation is not None:
                gateway.confirmation.cancel()

    async def close(self) -> None:
        """Ask nobody any more; a second time changes nothing."""
        tasks = [task for task in (self._task, *(b.confirmation for b in self._gateways.values())) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._sockets:
            _, one = self._sockets.popitem()
            asyncio.get_running_loop().remove_reader(one)
            one.close()

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
        if gateway.replied_at and not gateway.hung and gateway.confirmation is None and now - gateway.replied_at > HUNG_SECONDS:
            gateway.confirmation = asyncio.create_task(self._confirm_hung(address, gateway))
        self._ping(address)

    def _ping(self, address: str) -> None:
        with contextlib.suppress(OSError):  # full buffers and no route: as if it was lost on the way
            self._socket(address).sendto(self._nonce, (address, self._port))

    async def _confirm_hung(self, address: str, gateway: _GatewayHeartbeat) -> None:
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                alive = await self._confirm(address)
        except TimeoutError:
            alive = False
        gateway.confirmation = None
        if alive:  # datagrams are lost, not the gateway: they count again once one comes back
            gateway.replied_at = 0.0
        elif time.monotonic() - gateway.replied_at > HUNG_SECONDS:
            gateway.hung = True
            self._on_change(address)

    def _socket(self, address: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        if family not in self._sockets:
            made = socket.socket(family, socket.SOCK_DGRAM)
            made.setblocking(False)
            asyncio.get_running_loop().add_reader(made, self._receive, made)
            self._sockets[family] = made
        return self._sockets[family]

    def _receive(self, there: socket.socket) -> None:
        now = time.monotonic()
        while True:
            try:
                data, (address, *_) = there.recvfrom(64)
            except OSError:
                return
            gateway = self._gateways.get(address)
            if gateway is None or data != self._nonce:
                continue
            gateway.replied_at = now
            if gateway.hung:
                gateway.hung = False
                self._on_change(address)
