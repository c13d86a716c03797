# SPDX-License-Identifier: Apache-2.0
"""The unfinished requests that a gateway has sent to one engine, by their handles on the wire."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from mizzen.wire.client.image_upload import ImageUploads
from mizzen.wire.client.stream import EmbedReply, EngineOverloaded, EngineRefused, EngineStream, StreamLost
from mizzen.wire.codec import MalformedFrame
from mizzen.wire.columns import unpack_columns
from mizzen.wire.messages import Abort, Embedding, NeedImages, Outputs, Refused

Handle = EngineStream | EmbedReply
ABORT_AGAIN_SECONDS = 0.1


class RequestHandles:
    """Unfinished requests by handle; a handle stays in use until the engine has ended the request."""

    def __init__(self, send: Callable[[Abort], None]) -> None:
        """Create an empty set of requests; `send` sends aborts to the engine."""
        self._send = send
        self._used: dict[int, Handle] = {}
        self._rid = random.randrange(2**20)

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, handle: Handle) -> bool:
        return self._used.get(handle.rid) is handle

    def start_uploads(self, message: NeedImages, uploads: ImageUploads) -> None:
        """Send the images that the engine requested for a request; ignore a request that has ended."""
        handle = self._used.get(message.rid)
        if isinstance(handle, EngineStream):
            uploads.start(handle, message)

    def all(self) -> tuple[Handle, ...]:
        """Return all unfinished requests, in the order in which they were sent."""
        return tuple(self._used.values())

    def unused_handle(self) -> int:
        """Return a handle (uint32) that is not in use, without reserving it."""
        self._rid = (self._rid + 1) % 2**32
        while self._rid in self._used:
            self._rid = (self._rid + 1) % 2**32
        return self._rid

    def add(self, handle: Handle) -> None:
        """Add a request that was sent to the engine."""
        self._used[handle.rid] = handle

    def abort(self, handle: Handle) -> None:
        """Send an abort for a request; its handle stays in use until the engine answers."""
        try:
            self._send(Abort(handle.rid))
        except EngineOverloaded:
            asyncio.get_running_loop().call_later(ABORT_AGAIN_SECONDS, self._abort_again, handle)
        except StreamLost:
            pass  # the engine aborts the requests of a lost connection

    def add_outputs(self, message: Outputs) -> None:
        """Pass each request its tokens, log probabilities and result from the outputs of a step.

        Raises:
            MalformedFrame: the columns of the message have inconsistent lengths.
        """
        rids, offsets, counts, tokens = unpack_columns(message)
        for report in message.logprobs:
            handle = self._used.get(report.rid)
            if handle is not None:
                try:
                    handle.add_logprobs(report)
                except ValueError as error:
                    raise MalformedFrame(f"log probabilities of Outputs: {error}") from error
        start = 0
        for rid, offset, count in zip(rids, offsets, counts, strict=True):
            handle = self._used.get(rid)
            if handle is not None:
                handle.add_tokens(offset, tokens[start : start + count])
            start += count
        for finish in message.finished:
            handle = self._used.pop(finish.rid, None)
            if handle is not None:
                handle.finish(finish)

    def set_embedding(self, message: Embedding) -> None:
        """Pass a received embedding to its request and free the handle.

        Raises:
            MalformedFrame: the embedding is empty, or its size in bytes is not a multiple of 4 (float32).
        """
        if not message.vector or len(message.vector) % 4:
            raise MalformedFrame(f"an embedding of {len(message.vector)} bytes is not a float32 vector")
        reply = self._used.pop(message.rid, None)
        if isinstance(reply, EmbedReply):
            reply.set_embedding(message)

    def fail_refused(self, rid: int, message: Refused) -> None:
        """Fail a request that the engine rejected, and free its handle."""
        handle = self._used.pop(rid, None)
        if handle is not None:
            handle.fail(EngineRefused(message.code, message.message, message.retry_after_seconds))

    def fail_all(self, lost: StreamLost) -> None:
        """Fail all requests with `lost`, and free their handles."""
        used, self._used = self._used, {}
        for handle in used.values():
            handle.fail(lost)

    def _abort_again(self, handle: Handle) -> None:
        if handle in self:
            self.abort(handle)
