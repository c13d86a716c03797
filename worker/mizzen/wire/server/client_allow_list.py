# SPDX-License-Identifier: Apache-2.0
"""The allow-list of CURVE clients: a ZAP handler (RFC 27) that admits clients with certain public keys."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Iterable

import zmq
from zmq.utils import z85

from mizzen.wire.endpoint import ZAP_DOMAIN

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class AllowList:
    """Set of public keys whose owners may connect to the server sockets of one ZMQ context.

    A thread answers the context's authentication requests until the context is terminated, so that a
    handshake never waits for a step.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], public_keys: Iterable[bytes]) -> None:
        self._keys: tuple[bytes, ...] = ()
        self.allow(public_keys)
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ENDPOINT)  # before the first server socket binds, so that every client is checked
        self._thread = threading.Thread(target=self._run, name="wire-allow", daemon=True)
        self._thread.start()

    def allow(self, public_keys: Iterable[bytes]) -> None:
        """Accept only these public keys (Z85) in future handshakes; existing connections stay."""
        self._keys = tuple(z85.decode(key) for key in public_keys)  # replaced atomically, for the thread

    def _run(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()  # terminating the context waits until the socket is closed

    def _answer(self, request: list[bytes]) -> list[bytes]:
        number = request[1] if len(request) > 1 else b""
        allowed = (
            len(request) == 7
            and request[0] == _VERSION
            and request[2] == ZAP_DOMAIN
            and request[5] == b"CURVE"
            and any(hmac.compare_digest(request[6], key) for key in self._keys)
        )
        status = (b"200", b"OK") if allowed else (b"400", b"key not allowed")
        return [_VERSION, number, *status, b"gateway" if allowed else b"", b""]
