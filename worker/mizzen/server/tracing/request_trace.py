# SPDX-License-Identifier: Apache-2.0
"""Record of a finished, traced request, which rank 0 sends to the supervisor through a pipe."""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

from mizzen.common.request_timeline import PreemptionTimes, RequestTimeline

MAX_RECORD_BYTES = 4000
"""Maximum size of an encoded record; with its header, an atomic write to a pipe (4,096 bytes) has room."""
_HEADER = struct.Struct("<H")


class RequestTrace(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Times and counts of a request that has finished. Times are seconds of the monotonic clock."""

    timeline: RequestTimeline
    ended: float
    finish_reason: str
    """Name of the `FinishReason`, in lower case."""
    error: str = ""
    """Cause of the failure in one word; empty if the request did not fail."""
    embeds: bool = False
    """Whether the request asked for an embedding."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """Number of tokens that this engine generated."""
    resumed_tokens: int = 0
    """Number of output tokens that another engine had generated before it was lost."""
    mean_batch: float = 0.0
    """Mean number of tokens that a step generated, over the steps after the request's first token; 0 if
    unknown."""

    @property
    def decodes(self) -> bool:
        """Whether the request continued after its first token."""
        if self.embeds or not self.timeline.first_token:
            return False
        return self.output_tokens > 1 or bool(self.error) or bool(self.preemptions(decoding=True))

    def preemptions(self, *, decoding: bool) -> list[PreemptionTimes]:
        """Return the preemptions before the first token or, if `decoding`, after it."""
        first = self.timeline.first_token
        return [each for each in self.timeline.preemptions if decoding == bool(first and each.began >= first)]

    @property
    def spans(self) -> int:
        """Number of spans that the request becomes."""
        return 2 + (self.timeline.scheduled > 0) + self.decodes + len(self.timeline.preemptions)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RequestTrace)


def encode_trace(trace: RequestTrace) -> bytes:
    """Return a record with its header.

    Raises:
        ValueError: the record is longer than `MAX_RECORD_BYTES`.
    """
    body = _encoder.encode(trace)
    if len(body) > MAX_RECORD_BYTES:
        raise ValueError(f"the record of a trace has {len(body)} bytes; at most {MAX_RECORD_BYTES} fit")
    return _HEADER.pack(len(body)) + body


def read_trace(stream: BinaryIO) -> RequestTrace | None:
    """Return the next record of a stream, or None at its end.

    Raises:
        msgspec.MsgspecError: the record is malformed; the stream is at the next record.
    """
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(header)
    body = stream.read(size)
    return _decoder.decode(body) if len(body) == size else None
