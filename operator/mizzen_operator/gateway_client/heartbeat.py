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
SILENT_SECONDS = 2.1
CONFIRM_SECONDS = 0.5
LATE_SECONDS = 0.25
"""When this process itself is so late, it knows nothing of the others."""


@dataclass(slots=True)
class _Beat:
    """What is known of one gateway."""

    uses: int = 0
    heard: float = 0.0
    """When it answered last; 0 before it ever did."""
    silent: bool = False
    asked: asyncio.Task[None] | None = None


class Heartbeats:
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
        self._beats: dict[str, _Beat] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._task: asyncio.Task[None] | None = None

    def silent(self, address: str) -> bool:
        """Whether a gateway has answered before and does no longer."""
        beat = self._beats.get(address)
        return beat is not None and beat.silent

    def add(self, address: str) -> None:
        """Ask a gateway, until it is removed as often as it was added."""
        if address not in self._beats:
            self._beats[address] = _Beat()
            self._ping(address)  # at once: before its first answer nobody would notice that it hangs
        self._beats[address].uses += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="heartbeats")

    def remove(self, address: str) -> None:
        """Ask a gateway no more."""
        beat = self._beats[address]
        beat.uses -= 1
        if not beat.uses:
            del self._beats[address]
            if beat.asked is not None:
                beat.asked.cancel()

    async def close(self) -> None:
        """Ask nobody any more; a second time changes nothing."""
        tasks = [task for task in (self._task, *(b.asked for b in self._beats.values())) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._sockets:
            _, one = self._sockets.popitem()
            asyncio.get_running_loop().remove_reader(one)
            one.close()

    async def _run(self) -> None:
        part, last = 0, time.monotonic()
        while True:
            await asyncio.sleep(PERIOD_SECONDS / SLICES)
            now = time.monotonic()
            late, last = now - last - PERIOD_SECONDS / SLICES, now
            if late > LATE_SECONDS:
                for beat in self._beats.values():
                    beat.heard += late if beat.heard else 0.0
            part = (part + 1) % SLICES
            for address in list(self._beats)[part::SLICES]:
                self._ask(address, self._beats[address], now)

    def _ask(self, address: str, beat: _Beat, now: float) -> None:
        if beat.heard and not beat.silent and beat.asked is None and now - beat.heard > SILENT_SECONDS:
            beat.asked = asyncio.create_task(self._doubt(address, beat))
        self._ping(address)

    def _ping(self, address: str) -> None:
        with contextlib.suppress(OSError):  # full buffers and no route: as if it was lost on the way
            self._socket(address).sendto(self._nonce, (address, self._port))

    async def _doubt(self, address: str, beat: _Beat) -> None:
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                lives = await self._confirm(address)
        except TimeoutError:
            lives = False
        beat.asked = None
        if lives:  # datagrams are lost, not the gateway: they count again once one comes back
            beat.heard = 0.0
        elif time.monotonic() - beat.heard > SILENT_SECONDS:
            beat.silent = True
            self._on_change(address)

    def _socket(self, address: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        if family not in self._sockets:
            made = socket.socket(family, socket.SOCK_DGRAM)
            made.setblocking(False)
            asyncio.get_running_loop().add_reader(made, self._read, made)
            self._sockets[family] = made
        return self._sockets[family]

    def _read(self, there: socket.socket) -> None:
        now = time.monotonic()
        while True:
            try:
                data, (address, *_) = there.recvfrom(64)
            except OSError:
                return
            beat = self._beats.get(address)
            if beat is None or data != self._nonce:
                continue
            beat.heard = now
            if beat.silent:
                beat.silent = False
                self._on_change(address)
