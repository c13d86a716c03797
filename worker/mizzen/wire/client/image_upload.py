# SPDX-License-Identifier: Apache-2.0
"""Sends the images of requests to an engine in parts, as fast as the connection accepts them.

An engine requests images with `NeedImages`. ZMQ limits its queue only by the number of frames, and frames of
other requests wait behind those in the queue. Parts therefore wait here while `QUEUED_PARTS` earlier ones are
still queued in ZMQ, and requests take turns, one part each. The bytes belong to the requests; an upload only
refers to them, and is dropped when its request ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mizzen.wire.client.stream import EngineOverloaded, EngineStream, StreamLost
from mizzen.wire.messages import IMAGE_PART_BYTES, ImageContent, ImageReference, NeedImages

QUEUED_PARTS = 4
"""Maximum number of parts of images that are queued in ZMQ for one engine."""
ROOM_SECONDS = 0.005
"""Interval at which a full queue is checked."""


class PartTracker(Protocol):
    """Follows a frame through ZMQ, like `zmq.MessageTracker`."""

    @property
    def done(self) -> bool:
        """Whether the frame has left ZMQ's queue: it was sent, or dropped with its connection."""
        ...


@dataclass(frozen=True, slots=True)
class SentImage:
    """An image of a request: its reference, and the bytes that the engine may request."""

    reference: ImageReference
    content: bytes


@dataclass(slots=True)
class ImageUploadCounts:
    """Counters of the images that were sent to an engine, since they were last taken."""

    requested: int = 0
    """Number of images that the engine requested."""
    sent: int = 0
    """Number of images whose parts were all sent."""
    sent_bytes: int = 0

    def take(self) -> ImageUploadCounts:
        """Return the counts since the last call of this method."""
        taken = ImageUploadCounts(self.requested, self.sent, self.sent_bytes)
        self.requested = self.sent = self.sent_bytes = 0
        return taken


@dataclass(slots=True)
class _Upload:
    stream: EngineStream
    digest: bytes
    offset: int = 0


class ImageUploads:
    """Uploads of images to one engine. For use on one event loop."""

    def __init__(self, send: Callable[[ImageContent], PartTracker], counts: ImageUploadCounts) -> None:
        """Create an empty set of uploads.

        Args:
            send: puts a part into the connection's queue, and returns its tracker.
            counts: counters that are updated.
        """
        self._send = send
        self._counts = counts
        self._turns: deque[_Upload] = deque()
        self._queued: list[PartTracker] = []
        self._task: asyncio.Task[None] | None = None

    def start(self, stream: EngineStream, message: NeedImages) -> None:
        """Send images of a request that the engine requested.

        Unknown digests, and images that are being sent for the same request, are ignored.
        """
        pending = {upload.digest for upload in self._turns if upload.stream is stream}
        for digest in dict.fromkeys(message.digests):
            if digest in stream.images and digest not in pending:
                self._counts.requested += 1
                self._turns.append(_Upload(stream, digest))
        if self._turns and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def drop(self) -> None:
        """Drop all uploads, because the connection has ended."""
        self._turns.clear()
        self._queued.clear()

    async def _run(self) -> None:
        try:
            while self._turns:
                if not self._has_room():
                    await asyncio.sleep(ROOM_SECONDS)
                    continue
                upload, pause = self._turns.popleft(), 0.0
                try:
                    more = self._send_part(upload)
                except EngineOverloaded:  # other frames fill the queue
                    more, pause = True, ROOM_SECONDS
                if more:
                    self._turns.append(upload)
                await asyncio.sleep(pause)  # other tasks of the event loop go first
        finally:
            self._task = None

    def _has_room(self) -> bool:
        self._queued = [tracker for tracker in self._queued if not tracker.done]
        return len(self._queued) < QUEUED_PARTS

    def _send_part(self, upload: _Upload) -> bool:
        """Send the next part of an upload; return whether more parts follow.

        Raises:
            EngineOverloaded: the connection's queue is full.
        """
        content = upload.stream.images.get(upload.digest)  # none once the request has ended
        if content is None:
            return False
        part = content[upload.offset : upload.offset + IMAGE_PART_BYTES]
        try:
            tracker = self._send(ImageContent(upload.stream.rid, upload.digest, upload.offset, part))
        except StreamLost:
            return False
        self._queued.append(tracker)
        upload.offset += len(part)
        self._counts.sent_bytes += len(part)
        if upload.offset < len(content):
            return True
        self._counts.sent += 1
        return False
