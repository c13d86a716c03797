# SPDX-License-Identifier: Apache-2.0
"""One connection from a gateway to an engine: a DEALER socket that never reconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from mizzen.common.tasks import run_together
from mizzen.wire.client.key_offers import KeyOffer
from mizzen.wire.client.stream import EngineOverloaded, StreamLost
from mizzen.wire.codec import MalformedFrame, encode, gateway_decoder
from mizzen.wire.endpoint import enable_heartbeats, secure_client, use_address_family
from mizzen.wire.messages import MAX_FRAME_BYTES, WireMessage
from mizzen.wire.socket_readiness import SocketReadiness

SEND_FRAMES = 1000
RECEIVE_FRAMES = 4000
FRAMES_A_TURN = 32
"""Maximum number of frames handled before the event loop runs other tasks."""
NEVER_MILLISECONDS = 3_600_000
EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH
EVENTS |= zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.CLOSED


class EngineConnection:
    """A connection to one engine; when it ends, frames still queued in its socket are dropped."""

    def __init__(
        self,
        endpoint: str,
        context: zmq.asyncio.Context,
        offer: KeyOffer,
        *,
        timeout_seconds: float,
        take: Callable[[WireMessage], None],
        on_silence: Callable[[bool], None],
    ) -> None:
        """Create the connection; `run` connects.

        Args:
            endpoint: name of the engine in error messages.
            context: ZMQ context in which the socket is created.
            offer: endpoint and keys to connect with.
            timeout_seconds: time without a message after which the engine counts as silent.
            take: called with each message; a `MalformedFrame` or `StreamLost` that it raises ends the
                connection.
            on_silence: called with True when the engine becomes silent, and with False when it sends again.
        """
        self.patience = timeout_seconds
        """Seconds without a message after which the connection is given up; `EngineLink` increases this
        limit once the engine has sent `Welcome`."""
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
        self._received_at = time.monotonic()

    @property
    def quiet_seconds(self) -> float:
        """Seconds since the engine's last message."""
        return time.monotonic() - self._received_at

    async def run(self, hello: WireMessage) -> None:
        """Connect, send `hello`, and pass received messages to `take`.

        Raises:
            StreamLost: always, when the connection ends.
        """
        socket = self._open()
        monitor = socket.get_monitor_socket(int(EVENTS))
        self._socket, self._received_at = socket, time.monotonic()
        try:
            socket.connect(self._offer.endpoint)
            await self._handshake(monitor)
            self._received_at = time.monotonic()
            self.send(hello)
            await run_together(
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

    def send(self, message: WireMessage) -> None:
        """Put a message into the socket's queue without waiting.

        Raises:
            EngineOverloaded: the socket's queue is full.
            StreamLost: the connection has ended.
        """
        self._send_frame(encode(message))

    def send_tracked(self, message: WireMessage) -> zmq.MessageTracker:
        """Put a large message into the socket's queue without waiting or copying.

        Return a tracker, which is done once the message has been sent, or dropped with the connection.

        Raises:
            EngineOverloaded: the socket's queue is full.
            StreamLost: the connection has ended.
        """
        frame = zmq.Frame(encode(message), track=True, copy=False)
        self._send_frame(frame)
        return frame.tracker

    def _send_frame(self, frame: bytes | zmq.Frame) -> None:
        if self._socket is None:
            raise StreamLost("connection", f"not connected to {self._endpoint}")
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise EngineOverloaded(f"{self._endpoint} does not accept frames") from None
        except zmq.ZMQError as error:
            raise StreamLost("connection", f"{self._endpoint}: {error}") from error
        if self._readiness is not None:
            self._readiness.sent()

    def _open(self) -> zmq.Socket[bytes]:
        # A plain socket, not pyzmq's asyncio socket: `SocketReadiness` reports its frames, and only the
        # monitor socket is awaited.
        plain: Any = zmq.Socket
        socket: Any = self._context.socket(zmq.DEALER, plain)
        socket.linger = 0
        socket.sndhwm = SEND_FRAMES
        socket.rcvhwm = RECEIVE_FRAMES
        socket.maxmsgsize = MAX_FRAME_BYTES
        use_address_family(socket, self._offer.endpoint, connects=True)
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
            await asyncio.sleep(0.1)  # this event loop may have been blocked: let it read pending frames
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
        """Pass up to `FRAMES_A_TURN` available messages to `take`; return their number."""
        for count in range(FRAMES_A_TURN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return count
            self._received_at = time.monotonic()
            if self._silent:
                self._silent = False
                self._on_silence(False)
            try:
                self._take(self._decode_message(frames))
            except MalformedFrame as error:
                raise StreamLost("malformed", f"{self._endpoint}: {error}") from error
        return FRAMES_A_TURN

    def _decode_message(self, frames: list[bytes]) -> WireMessage:
        if len(frames) != 1:
            raise MalformedFrame(f"{len(frames)} frames in one message; the protocol allows one")
        return self._decode(frames[0])
