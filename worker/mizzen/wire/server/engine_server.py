# SPDX-License-Identifier: Apache-2.0
"""The engine's side of the wire protocol: a ROUTER socket that the serving loop polls between steps.

No event loop is involved. `receive` reads a bounded number of frames and returns requests and aborts;
`out.send` turns a step's output into one frame per peer, which is a connected gateway. Every queue is
bounded: ZMQ's queues by high-water marks (a peer that falls behind is dropped and its requests are aborted),
file parts by `FileUploads`, and waiting requests by `max_waiting` (half of these places are reserved for the
peers, in equal shares).
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from mizzen.core.images.types import MissingImages
from mizzen.core.request import Request
from mizzen.wire.codec import MalformedFrame, encode, engine_decoder
from mizzen.wire.curve_keys import KeyFolder, KeyPair, KeyRing, WireKeys
from mizzen.wire.endpoint import bracket_host, enable_heartbeats, require_safe, use_address_family
from mizzen.wire.limits import WireLimits
from mizzen.wire.messages import (
    FILE_PART_BYTES,
    IMAGES_PROTOCOL,
    MAX_GRAMMAR_BYTES,
    PROTOCOL,
    Abort,
    Embed,
    Generate,
    Hello,
    ImageContent,
    RefusalCode,
    Welcome,
)
from mizzen.wire.protocol_versions import ProtocolMismatch, choose_version
from mizzen.wire.server.client_allow_list import AllowList
from mizzen.wire.server.file_upload import FileUploads
from mizzen.wire.server.image_transfers import ImageTransfers, ReceivedImage
from mizzen.wire.server.image_validation import ImageModel
from mizzen.wire.server.invalid_request import InvalidImages, InvalidRequest
from mizzen.wire.server.listeners import KeyedListeners
from mizzen.wire.server.outbox import Outbox
from mizzen.wire.server.peers import Peer, ProtocolMismatchLog
from mizzen.wire.server.request_validation import MessageValidator

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Arrivals:
    """Requests to submit to the engine, ids of requests to abort after that, and images."""

    requests: list[Request] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    images: list[ReceivedImage] = field(default_factory=list)
    """Complete images that requests need."""


KEYS_SECONDS = 1.0
"""Interval at which a key folder is checked for changes."""
UPLOAD_SECONDS = 0.01
"""Interval at which the server checks whether it can send the next file part to a gateway."""


class WireServer:
    """The engine's end of all connections to gateways, with one ROUTER socket for each generation of its
    keys.

    For use from one thread. All times are in seconds of one monotonic clock.
    """

    def __init__(
        self,
        endpoint: str,
        keys: KeyFolder | WireKeys | None,
        welcome: Welcome,
        files: Mapping[str, bytes],
        *,
        max_waiting: int,
        limits: WireLimits | None = None,
        traces: bool = False,
        images: ImageModel | None = None,
    ) -> None:
        """Bind the endpoint, and accept both generations of keys during a key rotation.

        Args:
            endpoint: ZMQ endpoint of even key generations.
            keys: CURVE keys, or a key folder, whose changes are applied while the server runs; None for a
                local endpoint.
            welcome: description of the engine that is sent to each gateway.
            files: contents of the files that gateways may fetch, by name.
            max_waiting: maximum number of requests that wait in the engine.
            limits: limits and intervals; the defaults if None.
            traces: whether requests of sampled traces get a timeline.
            images: the model's rules for images; None if the engine accepts none.

        Raises:
            UnsafeEndpoint: `keys` is missing, but other machines can reach the endpoint.
            ValueError: the endpoint is malformed or cannot be bound.
        """
        endpoint = bracket_host(endpoint)
        require_safe(endpoint, keys)
        self._limits = limits or WireLimits()
        self._welcome = welcome
        self._max_waiting = max_waiting
        self._validator = MessageValidator(
            welcome.vocab_size, welcome.context_length, welcome.served_task, traces, images
        )
        self._decode = engine_decoder()
        self._timeouts: list[tuple[float, int, int]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wanted_endpoint = endpoint
        self._keys = keys
        self._keys_checked_at = 0.0
        ring = keys.ring if keys else None
        self._allow = AllowList(self._context, ring.peers) if ring else None
        self._listeners = KeyedListeners(endpoint, self._make_socket)
        self.out = Outbox(self._listeners, self._limits)
        self._uploads = FileUploads(files, self.out, self._limits)
        self._images = ImageTransfers(images, self.out, self._limits) if images is not None else None
        self._mismatch_log = ProtocolMismatchLog(self._limits.peers)
        self.endpoint = self._bind(ring)
        """Endpoint that gateways connect to; contains the chosen port if the port was `*`."""

    def _make_socket(self) -> zmq.Socket[bytes]:
        socket, limits = self._context.socket(zmq.ROUTER), self._limits
        socket.router_mandatory = True
        socket.sndhwm = limits.send_frames
        socket.rcvhwm = limits.receive_frames
        # Twice the size of the longest valid request, which consists mostly of its prompt and its grammar.
        longest = 2 * (MAX_GRAMMAR_BYTES + 4 * self._welcome.context_length)
        socket.maxmsgsize = max(longest, 2 * FILE_PART_BYTES) if self._welcome.images else longest
        use_address_family(socket, self._wanted_endpoint, connects=False)
        enable_heartbeats(socket, limits.heartbeat_seconds, limits.heartbeat_timeout_seconds)
        return socket

    def _bind(self, ring: KeyRing | None) -> str:
        number, pair = (ring.generation % 2, ring.own[0]) if ring else (0, None)
        try:
            endpoint = self._listeners.open(number, pair)
        except zmq.ZMQError as error:
            self._context.term()
            raise ValueError(f"cannot listen on {self._wanted_endpoint}: {error.strerror}") from None
        if ring is not None:
            self._sync_listeners(ring)
        return endpoint

    def _follow_keys(self, now: float) -> None:
        """Apply the current contents of the key folder; this also retries ports that could not be bound."""
        self._keys_checked_at = now
        if not isinstance(self._keys, KeyFolder):
            return
        self._keys.refresh()
        ring = self._keys.ring
        if self._allow is not None:
            self._allow.allow(ring.peers)
        self._sync_listeners(ring)

    def _sync_listeners(self, ring: KeyRing) -> None:
        """Listen with the key of each generation; close the listeners of old keys once they have no
        requests."""
        wanted = {(ring.generation + index) % 2: pair for index, pair in enumerate(ring.own)}
        for number, _ in self._listeners:
            if self._listeners.pair(number) != wanted.get(number):
                self._close_listener(number)
        open_listeners = dict(self._listeners)
        for number, pair in wanted.items():
            if number not in open_listeners:
                self._open_listener(number, pair)

    def _open_listener(self, number: int, pair: KeyPair) -> None:
        try:
            endpoint = self._listeners.open(number, pair)
        except (zmq.ZMQError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)  # the next check of the folder retries
            log.warning("cannot listen with the new keys", extra={"fields": {"reason": reason}})
            return
        log.info("listening with the new keys", extra={"fields": {"wire": endpoint}})

    def _close_listener(self, number: int) -> None:
        peers = [peer for peer in self.out.peers if peer.identity[0] == number]
        if any(peer.handles for peer in peers):
            return
        for peer in peers:
            self.out.forget(peer)
        self._listeners.close(number, self._limits.linger_seconds)
        log.info(
            "stopped accepting the old keys, disconnected idle gateways",
            extra={"fields": {"gateways": len(peers)}},
        )

    def wait(self, seconds: float, descriptor: int | None = None) -> None:
        """Sleep until a frame arrives or `descriptor` is readable, at most for `seconds`."""
        if self._uploads.waiting or (self._images is not None and self._images.checking):
            seconds = min(seconds, UPLOAD_SECONDS)
        self._listeners.poll(max(0, int(seconds * 1000)), descriptor)

    def receive(self, now: float, waiting: int) -> Arrivals:
        """Process received frames and expired queue timeouts; return requests to submit and to abort.

        Args:
            now: current time.
            waiting: number of requests that wait in the engine.
        """
        arrivals = Arrivals()
        if now - self._keys_checked_at >= KEYS_SECONDS:
            self._follow_keys(now)
        for number, socket in self._listeners:
            left = self._limits.bytes_per_receive
            for _ in range(self._limits.frames_per_receive):
                try:
                    identity, *frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._process(bytes((number,)) + identity, frames, now, waiting, arrivals.requests)
                left -= sum(map(len, frames))
                if left <= 0:
                    break
        if self._uploads.waiting:
            self._uploads.send()
        if self._timeouts:
            self._expire(now)
        if self._images is not None and len(self._images):
            arrivals.images = self._images.update(now)
        arrivals.aborts = self.out.take_aborts()
        return arrivals

    def request_images(self, missing: Sequence[MissingImages]) -> None:
        """Request images that live requests need from their gateways; `receive` returns them later."""
        if self._images is not None:
            self._images.request(missing)

    def next_timeout(self) -> float | None:
        """Return the time of the earliest queue timeout, or None if no request has one."""
        return self._timeouts[0][0] if self._timeouts else None

    def close(self) -> None:
        """Close all sockets once queued frames are sent, or after the linger time."""
        if self._images is not None:
            self._images.close()
        for number, _ in self._listeners:
            self._listeners.close(number, self._limits.linger_seconds)
        self._context.term()  # waits for lingering frames; the allow-list's thread closes its own socket

    def _process(
        self, identity: bytes, frames: list[bytes], now: float, waiting: int, requests: list[Request]
    ) -> None:
        """Process one message of a gateway; answer an invalid message with `Refused` and raise no error."""
        out = self.out
        try:
            if len(frames) != 1:
                raise MalformedFrame(f"{len(frames)} frames in one message; the protocol allows one")
            message = self._decode(frames[0])
        except MalformedFrame as error:
            out.counters.malformed += 1
            out.refuse(identity, None, RefusalCode.INVALID, f"malformed frame: {error}")
            return
        if isinstance(message, Hello):
            self._hello(identity, message)
            return
        peer = out.peers.get(identity)
        if peer is None:
            rid = message.rid if isinstance(message, Generate | Embed) else None
            out.refuse(identity, rid, RefusalCode.UNKNOWN_PEER, "send Hello first")
        elif isinstance(message, Generate | Embed):
            self._submit(peer, message, now, waiting, requests)
        elif isinstance(message, Abort):
            if message.rid in peer.handles:
                out.abort(peer.handles[message.rid])
        elif isinstance(message, ImageContent):
            if self._images is not None:
                self._images.add_part(peer, message, now)
        else:
            self._uploads.enqueue(peer, message)

    def _hello(self, identity: bytes, message: Hello) -> None:
        out = self.out
        known = out.peers.get(identity)
        if known:
            out.forget(known)
        name = message.gateway[:128]
        try:
            protocol = choose_version(message)
        except ProtocolMismatch as mismatch:
            self._refuse_protocol(identity, name, message.protocol, str(mismatch))
            return
        peer = out.peers.add(identity, name)
        if peer is None:
            text = f"{self._limits.peers} gateways are connected; no more are accepted"
            out.refuse(identity, None, RefusalCode.QUEUE_FULL, text)
            return
        peer.protocol = protocol
        fields = {"gateway": peer.name, "gateways": len(out.peers), "protocol": protocol}
        log.info("gateway connected", extra={"fields": fields})
        welcome = msgspec.structs.replace(self._welcome, protocol=protocol, draining=out.draining)
        replies = [welcome, out.last_stats]
        replies.append(out.all_blocks(peer))
        for reply in replies:
            if reply is not None and not out.send_to(peer, encode(reply)):
                return

    def _refuse_protocol(self, identity: bytes, name: str, protocol: int, reason: str) -> None:
        self.out.counters.other_protocol += 1
        if self._mismatch_log.new(name, protocol):
            fields = {"gateway": name, "protocol": protocol, "spoken": PROTOCOL}
            log.warning("rejected a gateway that speaks another protocol", extra={"fields": fields})
        self.out.refuse(identity, None, RefusalCode.INVALID, reason)

    def _submit(
        self, peer: Peer, message: Generate | Embed, now: float, waiting: int, requests: list[Request]
    ) -> None:
        out, waiting = self.out, waiting + len(requests)
        if message.rid in peer.handles:
            # Naming the handle in the rejection would make the gateway free it under the live request.
            text = f"rid {message.rid} is in use by a live request"
            out.refuse(peer.identity, None, RefusalCode.INVALID, text)
            return
        try:
            if peer.protocol < IMAGES_PROTOCOL and isinstance(message, Generate) and message.images:
                raise InvalidImages(f"images need version {IMAGES_PROTOCOL} of the wire protocol")
            request = self._validator.to_request(message, now)
        except InvalidRequest as error:
            out.counters.images_rejected["reference"] += isinstance(error, InvalidImages)
            out.refuse(peer.identity, message.rid, RefusalCode.INVALID, str(error))
            return
        if out.draining:
            text = "the engine is draining; try another one"
            out.refuse(peer.identity, message.rid, RefusalCode.DRAINING, text)
            return
        if self._queue_full(peer, waiting):
            text = f"{waiting} requests are waiting; at most {self._max_waiting} may"
            out.refuse(peer.identity, message.rid, RefusalCode.QUEUE_FULL, text)
            return
        rid = out.table.add(peer.index, message.rid, now)
        peer.handles[message.rid] = rid
        peer.unstarted += 1
        out.counters.accepted += 1
        if message.queue_seconds:
            self._limit_wait(rid, now + message.queue_seconds)
        if self._images is not None and isinstance(message, Generate) and message.images:
            self._images.add(rid, message.images)
        requests.append(msgspec.structs.replace(request, rid=rid))

    def _limit_wait(self, rid: int, deadline: float) -> None:
        table = self.out.table
        if len(self._timeouts) > 2 * len(table) + 1024:  # most entries belong to finished requests
            self._timeouts = [entry for entry in self._timeouts if table.generation[entry[1]] == entry[2]]
            heapq.heapify(self._timeouts)
        heapq.heappush(self._timeouts, (deadline, rid, int(table.generation[rid])))

    def _queue_full(self, peer: Peer, waiting: int) -> bool:
        """Return whether a peer's new request must be rejected because the queue is full.

        Half of the queue is reserved for the peers, in equal shares; the unused parts of other peers'
        shares count as occupied.
        """
        peers = self.out.peers
        share = self._max_waiting // (2 * len(peers))
        reserved = sum(max(0, share - other.unstarted) for other in peers if other is not peer)
        return waiting + reserved >= self._max_waiting

    def _expire(self, now: float) -> None:
        """Reject requests that have waited for their first token longer than their `queue_seconds`."""
        table = self.out.table
        while self._timeouts and self._timeouts[0][0] <= now:
            _, rid, generation = heapq.heappop(self._timeouts)
            if table.generation[rid] != generation or table.started[rid]:
                continue
            peer = self.out.peers.at(int(table.owner[rid]))
            if peer is None:
                continue
            handle, waited = int(table.handle[rid]), now - float(table.arrival[rid])
            self.out.disown(peer, rid, handle)
            text = f"no first token after {waited:.1f} s in the queue"
            self.out.refuse(peer.identity, handle, RefusalCode.QUEUE_TIMEOUT, text)
