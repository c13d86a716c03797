# SPDX-License-Identifier: Apache-2.0
"""ZMQ endpoints: checks that remote endpoints use CURVE keys, and socket options for keys and heartbeats."""

from __future__ import annotations

import ipaddress

import zmq

from mizzen.wire.curve_keys import KeyFolder, KeyPair, KeyRing, WireKeys

ZAP_DOMAIN = b"mizzen"


class UnsafeEndpoint(ValueError):
    """Other machines can reach an endpoint for which no keys are configured."""


def bracket_host(endpoint: str) -> str:
    """Return an endpoint with brackets around an IPv6 address; other endpoints are returned unchanged.

    Pods get their address from Kubernetes without brackets, so `tcp://$(POD_IP):5557` may lack them.
    """
    transport, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    bare = transport == "tcp" and ":" in host and not host.startswith("[")
    return f"tcp://[{host}]:{port}" if bare else endpoint


def use_address_family(socket: zmq.Socket[bytes], endpoint: str, *, connects: bool) -> None:
    """Allow IPv6 for an endpoint that may need it: an IPv6 address, or a name to which the socket connects.

    The name of a pod may have only IPv6 addresses. If it has IPv4 addresses, the socket uses one of them.
    """
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    is_name = endpoint.startswith("tcp://") and not host.replace(".", "").isdecimal()
    socket.ipv6 = host.startswith("[") or (connects and is_name)


def is_local(endpoint: str) -> bool:
    """Return whether only this machine can reach an endpoint.

    Raises:
        ValueError: the endpoint is not of the form tcp://HOST:PORT, ipc://PATH or inproc://NAME.
    """
    transport, separator, address = endpoint.partition("://")
    if not separator or not address or transport not in ("tcp", "ipc", "inproc"):
        raise ValueError(f"{endpoint!r} is not an endpoint; use tcp://HOST:PORT, ipc://PATH or inproc://NAME")
    if transport != "tcp":
        return True
    host, separator, port = address.rpartition(":")
    if not separator or not host or not (port.isdecimal() or port == "*"):
        raise ValueError(f"{endpoint!r} has no host and port; use tcp://HOST:PORT")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_safe(endpoint: str, keys: WireKeys | KeyFolder | KeyRing | KeyPair | None) -> None:
    """Raise an error if other machines can reach an endpoint that has no CURVE keys.

    Raises:
        UnsafeEndpoint: `keys` is missing, but other machines can reach the endpoint.
        ValueError: the endpoint is malformed.
    """
    if not is_local(endpoint) and keys is None:
        raise UnsafeEndpoint(
            f"{endpoint} can be reached from other machines and needs CURVE keys: give --keys FOLDER, "
            "or use tcp://127.0.0.1:PORT, ipc:// or inproc://"
        )


def generation_endpoint(endpoint: str, generation: int) -> str:
    """Return the endpoint at which an engine listens with its key of the given generation.

    The key of a socket cannot change, so each generation has its own socket: even generations use
    `endpoint`, odd generations the next port.

    Raises:
        ValueError: the generation is odd, and the port of a TCP endpoint is 65535 or not a number.
    """
    if not generation % 2:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}-odd"
    base, _, port = endpoint.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65535:
        raise ValueError(f"{endpoint} has no next port, which odd key generations need")
    return f"{base}:{int(port) + 1}"


def secure_server(socket: zmq.Socket[bytes], keys: KeyPair | WireKeys) -> None:
    """Make a socket a CURVE server; the `AllowList` of its ZMQ context decides which clients may connect."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret
    socket.curve_publickey = keys.public
    socket.zap_domain = ZAP_DOMAIN


def secure_client(socket: zmq.Socket[bytes], keys: WireKeys) -> None:
    """Make a socket a CURVE client that accepts only the server with the public key `keys.peer`."""
    socket.curve_serverkey = keys.peer
    socket.curve_secretkey = keys.secret
    socket.curve_publickey = keys.public


def enable_heartbeats(socket: zmq.Socket[bytes], seconds: float, timeout_seconds: float) -> None:
    """Enable ZMTP 3.1 heartbeats, which detect a peer that vanished without closing its connection."""
    socket.heartbeat_ivl = int(seconds * 1000)
    socket.heartbeat_timeout = int(timeout_seconds * 1000)
    socket.heartbeat_ttl = int(timeout_seconds * 1000)
