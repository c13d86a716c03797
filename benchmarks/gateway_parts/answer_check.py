# SPDX-License-Identifier: Apache-2.0
"""Checks the raw answers of the gateway byte by byte, after a run."""

from __future__ import annotations

import msgspec
import numpy as np
from gateway_parts.streams import Arrivals, Plan, Stream
from gateway_parts.vocabulary import Vocabulary
from numpy.typing import NDArray


class Delta(msgspec.Struct):
    """Text that a chunk adds to the answer."""

    role: str = ""
    content: str = ""


class Choice(msgspec.Struct):
    """The only choice in a chunk of the stream."""

    delta: Delta
    index: int
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """Token counts that the server reports for a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Event(msgspec.Struct):
    """The JSON object in a server-sent event of a stream."""

    id: str
    object: str
    model: str
    created: int
    choices: list[Choice]
    usage: Usage | None = None


class Checker:
    """Checks the raw bytes of answers against the expected text, token counts and finish reason."""

    def __init__(self, vocabulary: Vocabulary, replies: list[int], plan: Plan) -> None:
        self._plan = plan
        self._replies = replies
        self._decode = vocabulary.tokenizer.decode
        self._read = msgspec.json.Decoder(Event).decode
        size = {token: len(vocabulary.tokenizer.id_to_token(token)) for token in set(replies)}
        self._ends = np.concatenate([[0], np.cumsum([size[token] for token in replies])])

    def check(self, stream: Stream) -> tuple[list[float], Arrivals | None]:
        """Check an answer; return the arrival times of its events with text, and of its tokens.

        The tokens' times are None unless `Plan.timings` requests them. They are also None if the text
        contains replacement characters, because the text's bytes then cannot be assigned to tokens.

        Raises:
            ValueError: the answer is incorrect; the message says what is wrong.
        """
        if stream.error:
            raise ValueError(stream.error)
        head, _, rest = bytes(stream.raw).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 ") or b"text/event-stream" not in head:
            raise ValueError(bytes(stream.raw[:400]).decode(errors="replace"))
        times, counts = (np.array(column) for column in zip(*stream.marks, strict=True))
        when = times[np.searchsorted(counts, len(head) + 4 + np.array(events_end(rest)))]
        events = body(rest).decode().split("\n\n")
        if events[-2:] != ["data: [DONE]", ""] or len(events) != len(when) + 1:
            raise ValueError(f"the stream ends with {events[-3:]!r}")
        return self._events(stream, events[:-2], when)

    def _events(
        self, stream: Stream, events: list[str], when: NDArray[np.float64]
    ) -> tuple[list[float], Arrivals | None]:
        request, count = stream.request, self._plan.output_tokens
        parts: list[str] = []
        arrivals: list[float] = []
        reasons: list[str] = []
        usage = None
        for event, at in zip(events, when, strict=False):
            if not event.startswith("data: "):
                raise ValueError(f"not an event: {event!r}")
            read = self._read(event[6:])
            if read.object != "chat.completion.chunk" or read.model != "bench":
                raise ValueError(f"not a chunk: {event!r}")
            for choice in read.choices:
                if choice.delta.content:
                    parts.append(choice.delta.content)
                    arrivals.append(float(at))
                if choice.finish_reason is not None:
                    reasons.append(choice.finish_reason)
            usage = read.usage or usage
        text, wanted = "".join(parts), self._decode(self._replies[request.start : request.start + count])
        if text != wanted:
            raise ValueError(f"got {text[:200]!r}, expected {wanted[:200]!r}")
        if reasons != ["length"] or usage is None:
            raise ValueError(f"finish reasons {reasons}, usage {usage}")
        if (usage.prompt_tokens, usage.completion_tokens) != (request.tokens, count):
            raise ValueError(f"usage {usage}, expected {request.tokens} and {count}")
        if not self._plan.timings or "\ufffd" in wanted:
            return arrivals, None
        given = np.cumsum([len(part.encode()) for part in parts])
        ends = self._ends[request.start + 1 : request.start + 1 + count] - self._ends[request.start]
        return arrivals, Arrivals(request.key, stream.sent, np.array(arrivals)[np.searchsorted(given, ends)])


def chunks(rest: bytes) -> list[tuple[int, int]]:
    """Return the start and end of the content of each chunk in an HTTP body with chunked encoding.

    Raises:
        ValueError: the chunked encoding is invalid.
    """
    spans, at = [], 0
    while True:
        line = rest.index(b"\r\n", at)
        size = int(rest[at:line], 16)
        start = line + 2
        if rest[start + size : start + size + 2] != b"\r\n":
            raise ValueError(f"a chunk of {size} bytes does not end where it should")
        at = start + size + 2
        if not size:
            if at != len(rest):
                raise ValueError("there is data after the last chunk")
            return spans
        spans.append((start, start + size))


def body(rest: bytes) -> bytes:
    """Return the content of an HTTP body with chunked encoding."""
    return b"".join([rest[start:stop] for start, stop in chunks(rest)])


def events_end(rest: bytes) -> list[int]:
    """Return, for each server-sent event in a chunked body, the number of bytes up to the event's end."""
    ends: list[int] = []
    for start, stop in chunks(rest):
        at = rest.find(b"\n\n", start, stop)
        while at >= 0:
            ends.append(at + 2)
            at = rest.find(b"\n\n", at + 2, stop)
    return ends
