"""The allow-list of CURVE clients: a ZAP handler (RFC 27) that knows one public key."""

from __future__ import annotations

import hmac
import threading

import zmq
from zmq.utils import z85

from mizzen.wire.endpoint import ZAP_DOMAIN

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class AllowList:
    """Answers the authentication requests of one ZMQ context; ends when the context is destroyed.

    A thread of its own, asleep but for handshakes, so that a handshake never waits for a step.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], public_key: bytes) -> None:
        self._key = z85.decode(public_key)
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ENDPOINT)  # before the first server socket binds, so that none goes unjudged
        self._thread = threading.Thread(target=self._run, name="wire-allow", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()  # whatever happened: the context's end waits for it

    def _answer(self, request: list[bytes]) -> list[bytes]:
        number = request[1] if len(request) > 1 else b""
        allowed = (
            len(request) == 7
            and request[0] == _VERSION
            and request[2] == ZAP_DOMAIN
            and request[5] == b"CURVE"
            and hmac.compare_digest(request[6], self._key)
        )
        status = (b"200", b"OK") if allowed else (b"400", b"key not allowed")
        return [_VERSION, number, *status, b"gateway" if allowed else b"", b""]
