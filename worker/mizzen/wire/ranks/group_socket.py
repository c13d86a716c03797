"""TCP between the pods of a group: one listens (ROUTER), the others connect (DEALER).

Both ends use the engine's own CURVE keys, and only these are accepted. Each end has its own ZMQ context.
"""

from __future__ import annotations

from collections.abc import Mapping

import zmq

from mizzen.wire.curve_keys import KeyPair, WireKeys
from mizzen.wire.endpoint import enable_heartbeats, require_safe, secure_client, secure_server
from mizzen.wire.server.client_allow_list import AllowList

HEARTBEAT_SECONDS, HEARTBEAT_TIMEOUT_SECONDS = 1.0, 5.0
SocketOptions = Mapping[zmq.SocketOption, int]


class CannotListen(ValueError):
    """An endpoint cannot be bound because another program uses it, perhaps temporarily."""


class GroupListener:
    """The listening end. Used from one thread."""

    def __init__(
        self, endpoint: str, keys: KeyPair | None, *, linger_seconds: float, options: SocketOptions
    ) -> None:
        """Listen.

        Raises:
            UnsafeEndpoint: reachable from other machines, and no keys.
            CannotListen: another program uses the port.
            ValueError: the endpoint is malformed.
        """
        require_safe(endpoint, keys)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._allow = AllowList(self._context, [keys.public]) if keys else None
        self._socket = socket = _socket(self._context, zmq.ROUTER, endpoint, linger_seconds, options)
        if keys:
            secure_server(socket, keys)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise CannotListen(f"cannot listen on {endpoint}: {error.strerror}") from None
        self.endpoint = socket.get_string(zmq.LAST_ENDPOINT)
        """Endpoint to connect to; contains the chosen port if the port was `*`."""

    def close(self) -> None:
        """Stop listening after sent frames have left, within the linger time."""
        self._socket.close()
        self._context.term()  # waits for lingering frames; the allow-list's thread closes its own socket


class GroupMember:
    """A connecting end. Used from one thread."""

    def __init__(
        self,
        endpoint: str,
        keys: KeyPair | None,
        name: bytes,
        *,
        linger_seconds: float,
        options: SocketOptions,
    ) -> None:
        """Connect as `name` to a listener that may not listen, and whose name may not resolve, yet.

        Raises:
            UnsafeEndpoint: on another machine, and no keys.
            ValueError: the endpoint is malformed.
        """
        require_safe(endpoint, keys)
        self._linger = int(linger_seconds * 1000)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _socket(self._context, zmq.DEALER, endpoint, linger_seconds, options)
        self._socket.identity = name
        if keys:
            secure_client(self._socket, WireKeys(keys.public, keys.secret, keys.public))
        self._socket.connect(endpoint)

    def close(self) -> None:
        """Disconnect after sent frames have left, within the linger time."""
        self._context.destroy(linger=self._linger)


def _socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, linger: float, options: SocketOptions
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.linger = int(linger * 1000)
    socket.ipv6 = "[" in endpoint
    enable_heartbeats(socket, HEARTBEAT_SECONDS, HEARTBEAT_TIMEOUT_SECONDS)
    for option, value in options.items():
        socket.setsockopt(option, value)
    return socket
