"""Which ZMQ endpoints may be used without keys, and how keys are put on a socket."""

from __future__ import annotations

import ipaddress

import zmq

from mizzen.wire.curve_keys import KeyFolder, KeyPair, KeyRing, WireKeys

ZAP_DOMAIN = b"mizzen"


class UnsafeEndpoint(ValueError):
    """An endpoint that other machines can reach was given without keys."""


def is_local(endpoint: str) -> bool:
    """Tell whether only this machine can reach an endpoint.

    Raises:
        ValueError: the endpoint is not of the form tcp://HOST:PORT, ipc://PATH or inproc://NAME.
    """
    transport, separator, address = endpoint.partition("://")
    if not separator or not address or transport not in ("tcp", "ipc", "inproc"):
        raise ValueError(f"{endpoint!r} is no endpoint; give tcp://HOST:PORT, ipc://PATH or inproc://NAME")
    if transport != "tcp":
        return True
    host, separator, port = address.rpartition(":")
    if not separator or not host or not (port.isdecimal() or port == "*"):
        raise ValueError(f"{endpoint!r} names no host and port; give tcp://HOST:PORT")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_safe(endpoint: str, keys: WireKeys | KeyFolder | KeyRing | KeyPair | None) -> None:
    """Refuse an endpoint beyond this machine without keys.

    Raises:
        UnsafeEndpoint: other machines can reach it, and there are no keys.
        ValueError: the endpoint is malformed.
    """
    if not is_local(endpoint) and keys is None:
        raise UnsafeEndpoint(
            f"{endpoint} can be reached from other machines and needs CURVE keys: give --keys FOLDER, "
            "or use tcp://127.0.0.1:PORT, ipc:// or inproc://"
        )


def door(endpoint: str, generation: int) -> str:
    """Return where an engine takes connections with its key of a generation.

    The key of a socket cannot change, so each generation has a socket of its own: those with even numbers at
    the endpoint itself, those with odd ones at the next port.

    Raises:
        ValueError: the port is the last one, or not known yet.
    """
    if not generation % 2:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}-odd"
    base, _, port = endpoint.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65535:
        raise ValueError(f"{endpoint} has no next port, which odd generations of keys need")
    return f"{base}:{int(port) + 1}"


def secure_server(socket: zmq.Socket[bytes], keys: KeyPair | WireKeys) -> None:
    """Make a socket a CURVE server whose clients a ZAP handler judges (`mizzen.wire.server.client_allow_list`)."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret
    socket.curve_publickey = keys.public
    socket.zap_domain = ZAP_DOMAIN


def secure_client(socket: zmq.Socket[bytes], keys: WireKeys) -> None:
    """Make a socket a CURVE client that accepts the one server whose public key it holds."""
    socket.curve_serverkey = keys.peer
    socket.curve_secretkey = keys.secret
    socket.curve_publickey = keys.public


def heartbeats(socket: zmq.Socket[bytes], seconds: float, timeout_seconds: float) -> None:
    """Have ZMQ notice a peer that vanished without closing its connection (ZMTP 3.1 PING and PONG)."""
    socket.heartbeat_ivl = int(seconds * 1000)
    socket.heartbeat_timeout = int(timeout_seconds * 1000)
    socket.heartbeat_ttl = int(timeout_seconds * 1000)
