# SPDX-License-Identifier: Apache-2.0
"""The engine's listening sockets, one per key generation, combined to act as one ROUTER socket.

A connection's identity is the number of its listener (0 for even key generations, 1 for odd ones), followed
by its ZMQ identity on that listener.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import zmq

from mizzen.wire.curve_keys import KeyPair
from mizzen.wire.endpoint import generation_endpoint, secure_server

Socket = zmq.Socket[bytes]


class KeyedListeners:
    """Up to two listening ROUTER sockets, by number. For use from one thread."""

    def __init__(self, endpoint: str, make: Callable[[], Socket]) -> None:
        """Store the settings; `open` opens the listeners.

        Args:
            endpoint: endpoint of the listener for even key generations. If its port is `*`, a port is chosen
                when the first listener opens.
            make: returns a new ROUTER socket with all options set except for keys.
        """
        self._endpoint = endpoint
        self._make = make
        self._open: dict[int, tuple[Socket, KeyPair | None]] = {}

    def __iter__(self) -> Iterator[tuple[int, Socket]]:
        return iter([(number, socket) for number, (socket, _) in self._open.items()])

    def pair(self, number: int) -> KeyPair | None:
        """Return the key pair of an open listener, or None if it listens without keys."""
        return self._open[number][1]

    def open(self, number: int, pair: KeyPair | None) -> str:
        """Open listener `number` with a key pair, or without keys; return the bound endpoint.

        Raises:
            zmq.ZMQError: the endpoint cannot be bound.
            ValueError: `number` is 1, but the port of even generations is 65535 or not a number.
        """
        wild = self._endpoint.endswith(":*")
        endpoint = self._endpoint if wild else generation_endpoint(self._endpoint, number)
        socket = self._make()
        try:
            if pair is not None:
                secure_server(socket, pair)
            socket.bind(endpoint)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        bound = socket.get_string(zmq.LAST_ENDPOINT)
        if wild:  # odd generations use the port after that of even ones, whichever listener opens first
            base, _, port = bound.rpartition(":")
            self._endpoint = f"{base}:{int(port) - number}"
        self._open[number] = (socket, pair)
        return bound

    def close(self, number: int, linger_seconds: float = 0.0) -> None:
        """Close a listener and its connections once queued frames are sent, or after the linger time."""
        self._open.pop(number)[0].close(linger=int(linger_seconds * 1000))

    def poll(self, milliseconds: int, descriptor: int | None) -> None:
        """Sleep until a frame arrives or `descriptor` is readable, at most for `milliseconds`."""
        poller = zmq.Poller()
        for _, socket in self:
            poller.register(socket, zmq.POLLIN)
        if descriptor is not None:
            poller.register(descriptor, zmq.POLLIN)
        poller.poll(milliseconds)

    def send_multipart(self, parts: tuple[bytes, bytes | zmq.Frame], flags: int = 0) -> None:
        """Send a frame to a connection; `parts` is (identity, frame).

        Raises:
            zmq.ZMQError: EAGAIN if the connection's queue is full, EHOSTUNREACH if the connection or its
                listener is gone.
        """
        identity, frame = parts
        listener = self._open.get(identity[0])
        if listener is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        listener[0].send_multipart((identity[1:], frame), flags)
