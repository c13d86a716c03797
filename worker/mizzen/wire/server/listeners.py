"""The engine's listening sockets, one per key generation, combined to act as one ROUTER socket.

An identity is the number of the listener (0 or 1), followed by ZMQ's identity on that listener.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import zmq

from mizzen.wire.curve_keys import KeyPair
from mizzen.wire.endpoint import generation_endpoint, secure_server

Socket = zmq.Socket[bytes]


class KeyedListeners:
    """Up to two ROUTER sockets of one context. Used from one thread."""

    def __init__(self, endpoint: str, make: Callable[[], Socket]) -> None:
        """Create without listening.

        Args:
            endpoint: endpoint of even generations; its port may be `*` until the first listener is open.
            make: returns a ROUTER socket that is ready to bind.
        """
        self._endpoint = endpoint
        self._make = make
        self._open: dict[int, tuple[Socket, KeyPair | None]] = {}

    def __iter__(self) -> Iterator[tuple[int, Socket]]:
        return iter([(number, socket) for number, (socket, _) in self._open.items()])

    def pair(self, number: int) -> KeyPair | None:
        """Return the keys of an open listener."""
        return self._open[number][1]

    def open(self, number: int, pair: KeyPair | None) -> str:
        """Listen with a key pair; return the bound endpoint.

        Raises:
            zmq.ZMQError: the endpoint cannot be bound.
            ValueError: the generation has no endpoint.
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
        if wild:  # even generations use the port before that of odd ones, whichever opens first
            base, _, port = bound.rpartition(":")
            self._endpoint = f"{base}:{int(port) - number}"
        self._open[number] = (socket, pair)
        return bound

    def close(self, number: int, linger_seconds: float = 0.0) -> None:
        """Close a listener and its connections."""
        self._open.pop(number)[0].close(linger=int(linger_seconds * 1000))

    def poll(self, milliseconds: int, descriptor: int | None) -> None:
        """Sleep until a frame arrives or `descriptor` is readable, at most `milliseconds`."""
        poller = zmq.Poller()
        for _, socket in self:
            poller.register(socket, zmq.POLLIN)
        if descriptor is not None:
            poller.register(descriptor, zmq.POLLIN)
        poller.poll(milliseconds)

    def send_multipart(self, parts: tuple[bytes, bytes | zmq.Frame], flags: int = 0) -> None:
        """Send a frame to an identity; `parts` is (identity, frame).

        Raises:
            zmq.ZMQError: EAGAIN if its queue is full, EHOSTUNREACH if it or its listener is gone.
        """
        identity, frame = parts
        there = self._open.get(identity[0])
        if there is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        there[0].send_multipart((identity[1:], frame), flags)
