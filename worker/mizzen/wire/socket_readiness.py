# SPDX-License-Identifier: Apache-2.0
"""Calls a function when a ZMQ socket has frames, directly from the event loop's selector.

pyzmq's asyncio sockets would create several futures for each wait. A ZMQ socket's file descriptor signals
only that the socket's state may have changed (see ZMQ_FD). So frames must be read until none are left. After
each send, the socket must be checked for received frames, because sending may consume the signal that they
have arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


class SocketReadiness:
    """Calls `read` on the event loop while a socket has frames. For use in the event loop's thread."""

    def __init__(self, socket: zmq.Socket[bytes], read: Callable[[], bool]) -> None:
        """Store the arguments; `run` starts to read.

        `read` must read a bounded number of frames and return whether more may be available.
        """
        self._socket = socket
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._again: asyncio.Handle | None = None

    async def run(self) -> None:
        """Call `read` whenever frames are available, until cancelled.

        Raises:
            Exception: `read` raised it; `read` is not called again.
        """
        descriptor = self._socket.fileno()
        self._loop.add_reader(descriptor, self._ready)
        self._soon()
        try:
            await self._ended
        finally:
            self._loop.remove_reader(descriptor)
            self._ended.cancel()
            if self._again is not None:
                self._again.cancel()

    def sent(self) -> None:
        """Check for received frames; must be called after each send on the socket."""
        events = self._socket.getsockopt(_EVENTS)
        if isinstance(events, int) and events & _POLLIN:
            self._soon()

    def _soon(self) -> None:
        if self._again is None and not self._ended.done():
            self._again = self._loop.call_soon(self._next)

    def _next(self) -> None:
        self._again = None
        self._ready()

    def _ready(self) -> None:
        if self._ended.done():
            return
        try:
            more = self._read()
        except Exception as error:  # `run` raises it
            self._ended.set_exception(error)
            return
        if more:
            self._soon()
