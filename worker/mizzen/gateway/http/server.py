# SPDX-License-Identifier: Apache-2.0
"""Uvicorn servers and listening sockets of the gateway.

`main` creates a server for the API and another for the admin port; `processes` creates only the latter.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from mizzen.common.addresses import address_family
from mizzen.gateway.http.connection import BoundedProtocol
from mizzen.gateway.http.tls import ServerTls

log = logging.getLogger(__name__)


class UvicornServer(uvicorn.Server):
    """Uvicorn server that installs no signal handlers; `main` and `processes` handle signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not capture signals, unlike the base class."""
        yield


def new_server(
    app: ASGIApp,
    shutdown_seconds: int,
    tls: ServerTls | None = None,
    http: type[BoundedProtocol] = BoundedProtocol,
) -> UvicornServer:
    """Return a server that is not running yet.

    When it shuts down, requests in progress get `shutdown_seconds` to end.
    """
    return UvicornServer(
        uvicorn.Config(
            app,
            http=http,
            loop="none",
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=75,
            ssl_context_factory=(lambda *_: tls.context) if tls is not None else None,
            timeout_graceful_shutdown=shutdown_seconds,
        )
    )


def listen(host: str, port: int, shared: bool = False) -> socket.socket:
    """Return a listening TCP socket; port 0 chooses a free port.

    With `shared` (SO_REUSEPORT), further sockets of the same user may listen on the same port.

    Raises:
        OSError: the address is in use or does not belong to this host; the message names the address.
    """
    listener = socket.socket(address_family(host), socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def listen_on_loopback(listener: socket.socket, shared: bool = False) -> list[socket.socket]:
    """Listen on the loopback address too, at the port of a socket that listens on another address.

    `kubectl port-forward` connects to the loopback address of a pod, whereas a pod's programs listen on the
    pod's address.

    Args:
        listener: listening socket.
        shared: whether further processes of the gateway listen on the same address.

    Returns:
        The additional socket; nothing if `listener` listens on the loopback address or on all addresses, or
        if the port is in use there.
    """
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_loopback or address.is_unspecified:
        return []
    loopback = "::1" if address.version == 6 else "127.0.0.1"
    try:
        return [listen(loopback, port, shared)]
    except OSError as error:
        log.warning("kubectl port-forward cannot reach the gateway", extra={"fields": {"reason": str(error)}})
        return []
