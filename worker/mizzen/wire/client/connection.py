"""One connection from a gateway to an engine: a DEALER socket, from connect until the connection is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from mizzen.common.tasks import together
from mizzen.wire.client.key_offers import KeyOffer
from mizzen.wire.client.stream import EngineOverloaded, StreamLost
from mizzen.wire.codec import MalformedFrame, encode, gateway_decoder
from mizzen.wire.endpoint import enable_heartbeats, secure_client
from mizzen.wire.messages import MAX_FRAME_BYTES, Message
from mizzen.wire.socket_readiness import SocketReadiness

SEND_FRAMES = 1000
RECEIVE_FRAMES = 4000
FRAMES_A_TURN = 32
"""Number of frames handled before the event loop runs other tasks."""
NEVER_MILLISECONDS = 3_600_000
EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH
EVENTS |= zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.CLOSED


class EngineConnection:
    """A single connection; frames queued in its socket are dropped with it."""

    def __init__(
        self,
        endpoint: str,
        context: zmq.asyncio.Context,
        offer: KeyOffer,
        *,
        timeout_seconds: float,
        take: Callable[[Message], None],
        on_silence: Callable[[bool], None],
    ) -> None:
        """Create the connection; `run` connects.

        Args:
            endpoint: name of the engine in errors. context: ZMQ context of the socket. offer: endpoint and
            keys to connect with. timeout_seconds: time without a message after which the engine is silent.
            take: called with each message; a `MalformedFrame` or `StreamLost` that it raises ends the
            connection.
            on_silence: called with True when the engine becomes silent, and with False when it sends again.
        """
        self.patience = timeout_seconds
        """Seconds of silence after which the connection is given up."""
        self._endpoint = endpoint
        self._context = context
        self._offer = offer
        self._timeout = timeout_seconds
        self._take = take
        self._on_silence = on_silence
        self._decode = gateway_decoder()
        self._socket: zmq.Socket[bytes] | None = None
        self._readiness: SocketReadiness | None = None
        self._silent = False
        self._heard = time.monotonic()

    @property
    def quiet_seconds(self) -> float:
        """Seconds since the last message of the engine."""
        return time.monotonic() - self._heard

    async def run(self, hello: Message) -> None:
        """Connect, send `hello`, and pass received messages on.

        Raises:
            StreamLost: always, when the connection ends.
        """
        socket = self._open()
        monitor = socket.get_monitor_socket(int(EVENTS))
        self._socket, self._heard = socket, time.monotonic()
        try:
            socket.connect(self._offer.endpoint)
            await self._handshake(monitor)
            self._heard = time.monotonic()
            self.send(hello)
            await together(
                self._receive(socket), self._watch_connection(socket, monitor), self._watch_silence()
            )
        except TimeoutError:
            raise StreamLost("connection", f"{self._endpoint} does not answer") from None
        except (zmq.ZMQError, EngineOverloaded) as error:
            raise StreamLost("connection", f"{self._endpoint}: {error}") from error
        finally:
            self._socket = None
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    def send(self, message: Message) -> None:
        """Send without waiting.

        Raises:
            EngineOverloaded: the queue of frames is full.
            StreamLost: the connection has ended.
        """
        if self._socket is None:
            raise StreamLost("connection", f"not connected to {self._endpoint}")
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineOverloaded(f"{self._endpoint} does not accept frames") from None
        except zmq.ZMQError as error:
            raise StreamLost("connection", f"{self._endpoint}: {error}") from error
        if self._readiness is not None:
            self._readiness.sent()

    def _open(self) -> zmq.Socket[bytes]:
        # A plain socket: `SocketReadiness` signals frames, and only the monitor is awaited.
        plain: Any = zmq.Socket
        socket: Any = self._context.socket(zmq.DEALER, plain)
        socket.linger = 0
        socket.sndhwm = SEND_FRAMES
        socket.rcvhwm = RECEIVE_FRAMES
        socket.maxmsgsize = MAX_FRAME_BYTES
        socket.ipv6 = "[" in self._offer.endpoint
        # A new connection gets a new socket, so this one never reconnects. (With ZMQ_IMMEDIATE instead,
        # libzmq discards received and unread frames when the connection ends.)
        socket.reconnect_ivl = NEVER_MILLISECONDS
        enable_heartbeats(socket, max(0.2, self._timeout / 5), self._timeout)
        if self._offer.keys:
            secure_client(socket, self._offer.keys)
        return socket

    async def _handshake(self, monitor: Any) -> None:
        async with asyncio.timeout(self._timeout):
            event = (await recv_monitor_message(monitor))["event"]
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            return
        if event in (zmq.Event.CLOSED, zmq.Event.DISCONNECTED):
            raise StreamLost("connection", f"{self._endpoint} does not accept connections")
        raise StreamLost("handshake", f"{self._endpoint} rejects this gateway's keys, or does not speak ZMTP")

    async def _watch_connection(self, socket: zmq.Socket[bytes], monitor: Any) -> None:
        await recv_monitor_message(monitor)
        # The disconnect event overtakes earlier frames: a drained engine sends its last frames and closes.
        unread = True
        while unread:
            unread = self._read(socket) == FRAMES_A_TURN
            await asyncio.sleep(0)
        raise StreamLost("connection", f"the connection to {self._endpoint} was closed")

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(self._timeout / 4)
            if self.quiet_seconds <= self._timeout:
                continue
            await asyncio.sleep(0.1)  # this loop itself may have been blocked: let it read pending frames
            if self.quiet_seconds > self.patience:
                raise StreamLost("silent", f"{self._endpoint} was silent for {self.quiet_seconds:.1f} s")
            if self.quiet_seconds > self._timeout and not self._silent:
                self._silent = True
                self._on_silence(True)

    async def _receive(self, socket: zmq.Socket[bytes]) -> None:
        self._readiness = readiness = SocketReadiness(socket, lambda: self._read(socket) == FRAMES_A_TURN)
        try:
            await readiness.run()
        finally:
            self._readiness = None

    def _read(self, socket: zmq.Socket[bytes]) -> int:
        """Handle up to `FRAMES_A_TURN` available frames; return their number."""
        for count in range(FRAMES_A_TURN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return count
            self._heard = time.monotonic()
            if self._silent:
                self._silent = False
                self._on_silence(False)
            try:
                self._take(self._one(frames))
            except MalformedFrame as error:
                raise StreamLost("malformed", f"{self._endpoint}: {error}") from error
        return FRAMES_A_TURN

    def _one(self, frames: list[bytes]) -> Message:
        if len(frames) != 1:
            raise MalformedFrame(f"{len(frames)} frames in one message; the protocol has one")
        return self._decode(frames[0])
