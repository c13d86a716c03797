# SPDX-License-Identifier: Apache-2.0
"""Access log: one line of JSON per request on standard output; the process's own log goes to standard error.

A thread writes the lines, so that a slow reader of the log does not delay requests. If the queue of lines is
full, lines are dropped; their number is logged as soon as the queue has space again. Prompts and answers are
not logged; `--access-log prompts` adds the prompts.
"""

from __future__ import annotations

import queue
import sys
import threading
from datetime import UTC, datetime
from typing import Any, BinaryIO

import msgspec

from mizzen.gateway.telemetry.request_record import MAX_PROMPT_CHARACTERS, RequestRecord

ATOMIC_WRITE_BYTES = 4096
"""Size in bytes up to which Linux does not split a write to a pipe (PIPE_BUF).

Several processes write to the same output.
"""
MAX_QUEUED_LINES = 4096
"""Maximum number of lines that wait to be written."""


class AccessLogLine(msgspec.Struct, omit_defaults=True):
    """Line of the access log."""

    time: str
    """Time when the request arrived, in RFC 3339."""
    event: str
    """Always "request"."""
    id: str
    method: str
    path: str
    status: int
    seconds: float
    """Time from the request's arrival to the last byte of its response."""
    model: str = ""
    key: str = ""
    """Name of the API key."""
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_seconds: float | None = None
    engine: str = ""
    """Name of the last engine to which the request was sent."""
    route: str = ""
    """Reason why the router chose `engine`."""
    attempts: int = 0
    """Number of times that the request was sent to an engine."""
    finish_reasons: list[str] = msgspec.field(default_factory=list)
    error: str = ""
    trace: str = ""
    """W3C trace id; empty if the request was not traced."""
    prompt: str = ""


class AccessLog:
    """Writes a line for each request that has ended. Its methods must be called from one thread."""

    def __init__(self, prompts: bool, stream: BinaryIO | None = None) -> None:
        self.prompts = prompts
        self._stream = stream or sys.stdout.buffer
        self._encode = msgspec.json.Encoder().encode
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED_LINES)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def write(self, record: RequestRecord) -> None:
        """Queue the line of a request that has ended; drop the line if the queue is full."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
            self._thread.start()
        try:
            if self._dropped:
                self._waiting.put_nowait(self._encode({"event": "dropped", "lines": self._dropped}) + b"\n")
                self._dropped = 0
            self._waiting.put_nowait(self._encode(self._line(record)) + b"\n")
        except queue.Full:
            self._dropped += 1

    def close(self, seconds: float = 2.0) -> None:
        """Stop the thread after it has written all queued lines.

        This waits at most `seconds` for space in the queue, and then at most `seconds` for the thread.
        """
        if self._thread is None:
            return
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)
        self._thread = None

    def _run(self) -> None:
        batch = b""
        while (line := self._waiting.get()) is not None:
            if batch and len(batch) + len(line) > ATOMIC_WRITE_BYTES:
                self._put(batch)
                batch = b""
            batch += line
            if self._waiting.empty():
                self._put(batch)
                batch = b""
        self._put(batch)

    def _put(self, lines: bytes) -> None:
        try:
            self._stream.write(lines)
            self._stream.flush()
        except (OSError, ValueError):  # the reader of the log is gone: the gateway goes on without it
            pass

    def _line(self, record: RequestRecord) -> AccessLogLine:
        last = record.attempts[-1] if record.attempts else None
        first = record.first_token_seconds
        return AccessLogLine(
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
            attempts=record.attempt_count,
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
    """Return a Unix time in RFC 3339, with milliseconds."""
    return datetime.fromtimestamp(clock, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
