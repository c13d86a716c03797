# SPDX-License-Identifier: Apache-2.0
"""Sends an engine's files to gateways in parts, as fast as the gateways' connections accept them.

A part is large, and ZMQ limits its queues only by the number of frames. A gateway's requests for parts
therefore wait here while earlier parts for the same gateway are still queued in ZMQ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import zmq

from mizzen.wire.codec import encode
from mizzen.wire.limits import WireLimits
from mizzen.wire.messages import FILE_PART_BYTES, FetchFile, File, RefusalCode
from mizzen.wire.server.outbox import Outbox
from mizzen.wire.server.peers import Peer


class FileUploads:
    """Pending requests for file parts; the peers take turns. For use from the server's thread."""

    def __init__(self, files: Mapping[str, bytes], out: Outbox, limits: WireLimits) -> None:
        self._files = files
        self._out = out
        self._limits = limits
        self._turns: deque[Peer] = deque()
        """Peers with pending requests, in the order of their turns; dropped peers may still be among them."""
        self._queued: dict[bytes, list[zmq.MessageTracker]] = {}
        """Parts queued in ZMQ, by the connection's identity; ZMQ's queue may outlive the `Peer`."""

    @property
    def waiting(self) -> bool:
        """Whether requests for file parts are pending."""
        return bool(self._turns)

    def enqueue(self, peer: Peer, message: FetchFile) -> None:
        """Queue a request, which `send` will answer; reject the request if it is invalid or if the peer has
        too many pending requests."""
        refuse, content = self._out.refuse, self._files.get(message.name)
        if content is None:
            text = f"no file {message.name[:128]!r}; available: {', '.join(sorted(self._files)) or 'none'}"
            refuse(peer.identity, None, RefusalCode.INVALID, text)
        elif message.offset % FILE_PART_BYTES or not 0 <= message.offset <= len(content):
            text = (
                f"offset {message.offset} of {message.name} is not a multiple of {FILE_PART_BYTES} within it"
            )
            refuse(peer.identity, None, RefusalCode.INVALID, text)
        elif len(peer.file_requests) >= self._limits.file_requests:
            text = f"{len(peer.file_requests)} requests for file parts are pending; no more are accepted"
            refuse(peer.identity, None, RefusalCode.QUEUE_FULL, text)
        else:
            if not peer.file_requests:
                self._turns.append(peer)
            peer.file_requests.append(message)

    def send(self) -> None:
        """Send up to `WireLimits.parts_per_receive` parts to peers with few parts queued in ZMQ."""
        left = self._limits.parts_per_receive
        for _ in range(len(self._turns)):
            if not left:
                return
            peer = self._turns.popleft()
            if self._out.peers.get(peer.identity) is not peer:
                continue
            if self._has_room(peer):
                self._part(peer, peer.file_requests.popleft())
                left -= 1
            if peer.file_requests:
                self._turns.append(peer)

    def _has_room(self, peer: Peer) -> bool:
        queued = self._queued.get(peer.identity, ())
        return sum(not tracker.done for tracker in queued) < self._limits.queued_parts

    def _part(self, peer: Peer, request: FetchFile) -> None:
        content = self._files[request.name]
        part = content[request.offset : request.offset + FILE_PART_BYTES]
        frame = encode(File(request.name, request.offset, len(content), part))
        tracked = zmq.Frame(frame, track=True, copy=False)
        self._remove_sent()
        if self._out.send_to(peer, tracked):
            self._queued.setdefault(peer.identity, []).append(tracked.tracker)

    def _remove_sent(self) -> None:
        """Remove the entries of parts that have left ZMQ's queues: sent, or dropped with their connection."""
        for identity, parts in tuple(self._queued.items()):
            parts[:] = [tracker for tracker in parts if not tracker.done]
            if not parts:
                del self._queued[identity]
