# SPDX-License-Identifier: Apache-2.0
"""TCP connections between the pods of a group: one pod listens (ROUTER), the other pods connect (DEALER).

All pods use the same key pair, which is one of the engine's CURVE key pairs, and accept no other key. Each
end has its own ZMQ context.
"""

from __future__ import annotations

from collections.abc import Mapping

import zmq

from mizzen.wire.curve_keys import KeyPair, WireKeys
from mizzen.wire.endpoint import (
    enable_heartbeats,
    require_safe,
    secure_client,
    secure_server,
    use_address_family,
)
from mizzen.wire.server.client_allow_list import AllowList

HEARTBEAT_SECONDS, HEARTBEAT_TIMEOUT_SECONDS = 1.0, 5.0
SocketOptions = Mapping[zmq.SocketOption, int]


class CannotListen(ValueError):
    """An endpoint cannot be bound; another program may be using it temporarily."""


class GroupListener:
    """The listening end of the connections between pods. For use from one thread."""

    def __init__(
        self, endpoint: str, keys: KeyPair | None, *, linger_seconds: float, options: SocketOptions
    ) -> None:
        """Listen at the endpoint.

        Args:
            endpoint: ZMQ endpoint; the port may be `*`.
            keys: CURVE key pair of this end and of every connecting end; None for a local endpoint.
            linger_seconds: time for which `close` waits until queued frames are sent.
            options: additional options of the socket.

        Raises:
            UnsafeEndpoint: `keys` is missing, but other machines can reach the endpoint.
            CannotListen: the endpoint cannot be bound.
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
        """Bound endpoint; contains the chosen port if the port was `*`."""

    def close(self) -> None:
        """Stop listening once queued frames are sent, or after the linger time."""
        self._socket.close()
        self._context.term()  # waits for lingering frames; the allow-list's thread closes its own socket


class GroupMember:
    """A connecting end of the connections between pods. For use from one thread."""

    def __init__(
        self,
        endpoint: str,
        keys: KeyPair | None,
        name: bytes,
        *,
        linger_seconds: float,
        options: SocketOptions,
    ) -> None:
        """Connect to a listener, which may start later and whose host name may not resolve yet.

        Args:
            endpoint: ZMQ endpoint of the listener.
            keys: CURVE key pair of this end and of the listener; None for a local endpoint.
            name: ZMQ identity of this end.
            linger_seconds: time for which `close` waits until queued frames are sent.
            options: additional options of the socket.

        Raises:
            UnsafeEndpoint: `keys` is missing, but the endpoint is on another machine.
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
        """Disconnect once queued frames are sent, or after the linger time."""
        self._context.destroy(linger=self._linger)


def _socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, linger: float, options: SocketOptions
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.linger = int(linger * 1000)
    use_address_family(socket, endpoint, connects=kind == zmq.DEALER)
    enable_heartbeats(socket, HEARTBEAT_SECONDS, HEARTBEAT_TIMEOUT_SECONDS)
    for option, value in options.items():
        socket.setsockopt(option, value)
    return socket
