"""The access log: one line of JSON a request, on standard output; the process's own log is on standard error.

Prompts and answers are not in it. `--access-log prompts` adds the prompt, for whoever may read it.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any, BinaryIO

import msgspec

from mizzen.gateway.record import Record

MAX_PROMPT_CHARACTERS = 32_768
"""Of the JSON of a prompt; the rest is cut off."""


class Line(msgspec.Struct, omit_defaults=True):
    """A line of the access log."""

    time: str
    """When the request arrived."""
    event: str
    """Always "request"."""
    id: str
    method: str
    path: str
    status: int
    seconds: float
    """From its arrival to its last byte."""
    model: str = ""
    key: str = ""
    """Name of the API key."""
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_seconds: float | None = None
    engine: str = ""
    """The last one that had it."""
    route: str = ""
    """Why it went there."""
    attempts: int = 0
    """Engines that it was sent to."""
    finish_reasons: list[str] = msgspec.field(default_factory=list)
    error: str = ""
    trace: str = ""
    """Trace id, where the request was traced."""
    prompt: str = ""


class AccessLog:
    """Writes a line for each request that has ended."""

    def __init__(self, prompts: bool, stream: BinaryIO | None = None) -> None:
        self.prompts = prompts
        self._stream = stream or sys.stdout.buffer
        self._encode = msgspec.json.Encoder().encode

    def write(self, record: Record) -> None:
        """Write a request's line."""
        try:
            self._stream.write(self._encode(self._line(record)) + b"\n")
            self._stream.flush()
        except (OSError, ValueError):  # whoever read the log is gone: requests are served all the same
            pass

    def _line(self, record: Record) -> Line:
        last = record.attempts[-1] if record.attempts else None
        first = record.first_token_seconds
        return Line(
            time=timestamp(record.clock),
            event="request",
            id=record.request_id,
            method=record.method,
            path=record.path[:256],
            status=record.status,
            seconds=round(record.seconds, 6),
            model=record.model[:256],
            key=record.key,
            stream=record.stream,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            completion_tokens=record.completion_tokens,
            first_token_seconds=None if first is None else round(first, 6),
            engine=last.engine if last else "",
            route=last.reason if last else "",
            attempts=record.tried,
            finish_reasons=record.finish_reasons,
            error=record.error,
            trace=record.traceparent[3:35],
            prompt=self._prompt(record.prompt) if self.prompts else "",
        )

    def _prompt(self, prompt: Any) -> str:
        if prompt is None:
            return ""
        text = prompt if isinstance(prompt, str) else self._encode(prompt).decode()
        return text[:MAX_PROMPT_CHARACTERS]


def timestamp(clock: float) -> str:
    """Return a Unix time as RFC 3339, with milliseconds."""
    return datetime.fromtimestamp(clock, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
