"""Sends an engine's files to gateways in parts, as fast as their connections accept them.

A part is large, and ZMQ bounds its queues only by number of frames. Requests of a gateway therefore wait here
while earlier parts for it are still queued in ZMQ.
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
    """The uploads in progress, round-robin over all peers. Used from the outbox's thread."""

    def __init__(self, files: Mapping[str, bytes], out: Outbox, limits: WireLimits) -> None:
        self._files = files
        self._out = out
        self._limits = limits
        self._turns: deque[Peer] = deque()
        """Peers with pending requests; some may have been dropped."""
        self._under_way: dict[bytes, list[zmq.MessageTracker]] = {}
        """Parts queued in ZMQ, by connection: another `Hello` does not shorten its queue."""

    @property
    def waiting(self) -> bool:
        """Whether requests are pending."""
        return bool(self._turns)

    def ask(self, peer: Peer, message: FetchFile) -> None:
        """Queue a request for `send`; reject it if it is invalid or the peer has too many pending."""
        refuse, content = self._out.refuse, self._files.get(message.name)
        if content is None:
            text = f"no file {message.name[:128]!r}; available: {', '.join(sorted(self._files)) or 'none'}"
            refuse(peer.identity, None, RefusalCode.INVALID, text)
        elif message.offset % FILE_PART_BYTES or not 0 <= message.offset <= len(content):
            text = (
                f"offset {message.offset} of {message.name} is not a multiple of {FILE_PART_BYTES} within it"
            )
            refuse(peer.identity, None, RefusalCode.INVALID, text)
        elif len(peer.file_requests) >= self._limits.file_asks:
            text = f"{len(peer.file_requests)} file parts are pending already; the limit is reached"
            refuse(peer.identity, None, RefusalCode.QUEUE_FULL, text)
        else:
            if not peer.file_requests:
                self._turns.append(peer)
            peer.file_requests.append(message)

    def send(self) -> None:
        """Send a few parts to peers whose connections have accepted earlier ones."""
        left = self._limits.parts_per_receive
        for _ in range(len(self._turns)):
            if not left:
                return
            peer = self._turns.popleft()
            if self._out.peers.get(peer.identity) is not peer:
                continue
            if self._takes(peer):
                self._part(peer, peer.file_requests.popleft())
                left -= 1
            if peer.file_requests:
                self._turns.append(peer)

    def _takes(self, peer: Peer) -> bool:
        kept = self._under_way.get(peer.identity, ())
        return sum(not one.done for one in kept) < self._limits.parts_under_way

    def _part(self, peer: Peer, ask: FetchFile) -> None:
        content = self._files[ask.name]
        part = content[ask.offset : ask.offset + FILE_PART_BYTES]
        frame = encode(File(ask.name, ask.offset, len(content), part))
        tracked = zmq.Frame(frame, track=True, copy=False)
        self._tidy()
        if self._out.send_to(peer, tracked):
            self._under_way.setdefault(peer.identity, []).append(tracked.tracker)

    def _tidy(self) -> None:
        """Remove parts that were accepted or dropped with their connection."""
        for identity, parts in tuple(self._under_way.items()):
            parts[:] = [one for one in parts if not one.done]
            if not parts:
                del self._under_way[identity]
