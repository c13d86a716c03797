"""The live requests of one engine, by their handles on the wire."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from mizzen.wire.client.stream import EmbedReply, EngineOverloaded, EngineRefused, EngineStream, StreamLost
from mizzen.wire.codec import MalformedFrame
from mizzen.wire.columns import unpack_columns
from mizzen.wire.messages import Abort, Embedding, Outputs, Refused

Handle = EngineStream | EmbedReply
ABORT_AGAIN_SECONDS = 0.1


class RequestHandles:
    """Requests that have not finished. A handle stays in use until the engine has answered."""

    def __init__(self, send: Callable[[Abort], None]) -> None:
        """Send aborts with `send`."""
        self._send = send
        self._used: dict[int, Handle] = {}
        self._rid = random.randrange(2**20)

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, handle: Handle) -> bool:
        return self._used.get(handle.rid) is handle

    def all(self) -> tuple[Handle, ...]:
        """Return all requests, in the order in which they were sent."""
        return tuple(self._used.values())

    def free(self) -> int:
        """Return a handle that is not in use."""
        self._rid = (self._rid + 1) % 2**32
        while self._rid in self._used:
            self._rid = (self._rid + 1) % 2**32
        return self._rid

    def add(self, handle: Handle) -> None:
        """Register a request that was sent."""
        self._used[handle.rid] = handle

    def abort(self, handle: Handle) -> None:
        """Send an abort; the handle stays in use until the engine answers."""
        try:
            self._send(Abort(handle.rid))
        except EngineOverloaded:
            asyncio.get_running_loop().call_later(ABORT_AGAIN_SECONDS, self._abort_again, handle)
        except StreamLost:
            pass  # the engine aborts the requests of a lost connection

    def outputs(self, message: Outputs) -> None:
        """Distribute the outputs of a step to their requests.

        Raises:
            MalformedFrame: the lengths of the columns are inconsistent.
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

    def embedding(self, message: Embedding) -> None:
        """Pass an embedding to its request.

        Raises:
            MalformedFrame: the embedding is not a float32 vector.
        """
        if not message.vector or len(message.vector) % 4:
            raise MalformedFrame(f"an embedding of {len(message.vector)} bytes is not a float32 vector")
        reply = self._used.pop(message.rid, None)
        if isinstance(reply, EmbedReply):
            reply.set_embedding(message)

    def refused(self, rid: int, message: Refused) -> None:
        """Fail a request that the engine rejected."""
        handle = self._used.pop(rid, None)
        if handle is not None:
            handle.fail(EngineRefused(message.code, message.message, message.retry_after_seconds))

    def lost(self, lost: StreamLost) -> None:
        """Fail all requests, because the connection was lost."""
        used, self._used = self._used, {}
        for handle in used.values():
            handle.fail(lost)

    def _abort_again(self, handle: Handle) -> None:
        if handle in self:
            self.abort(handle)
