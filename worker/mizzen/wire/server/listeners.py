"""The engine's listening sockets: one for each generation of its keys, together as one ROUTER socket.

An identity is the door's number (0 or 1), then ZMQ's own identity behind that door.
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
        """Open nothing yet.

        Args:
            endpoint: of even generations; its port may be `*` until the first is open.
            make: returns a ROUTER socket that is ready to bind.
        """
        self._endpoint = endpoint
        self._make = make
        self._open: dict[int, tuple[Socket, KeyPair | None]] = {}

    def __iter__(self) -> Iterator[tuple[int, Socket]]:
        return iter([(number, socket) for number, (socket, _) in self._open.items()])

    def pair(self, number: int) -> KeyPair | None:
        """Return the keys of an open door."""
        return self._open[number][1]

    def open(self, number: int, pair: KeyPair | None) -> str:
        """Listen with a pair of keys; return the endpoint.

        Raises:
            zmq.ZMQError: it cannot be bound.
            ValueError: there is no such endpoint.
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
        if wild:  # whichever comes first, even generations have the port before that of odd ones
            base, _, port = bound.rpartition(":")
            self._endpoint = f"{base}:{int(port) - number}"
        self._open[number] = (socket, pair)
        return bound

    def close(self, number: int, linger_seconds: float = 0.0) -> None:
        """Listen at a door no more, and end its connections."""
        self._open.pop(number)[0].close(linger=int(linger_seconds * 1000))

    def poll(self, milliseconds: int, descriptor: int | None) -> None:
        """Sleep until a frame or something on a file descriptor is there."""
        poller = zmq.Poller()
        for _, socket in self:
            poller.register(socket, zmq.POLLIN)
        if descriptor is not None:
            poller.register(descriptor, zmq.POLLIN)
        poller.poll(milliseconds)

    def send_multipart(self, parts: tuple[bytes, bytes | zmq.Frame], flags: int = 0) -> None:
        """Send a frame to the identity that comes first.

        Raises:
            zmq.ZMQError: EAGAIN when its queue is full, EHOSTUNREACH when it is gone, also with its door.
        """
        identity, frame = parts
        there = self._open.get(identity[0])
        if there is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        there[0].send_multipart((identity[1:], frame), flags)
