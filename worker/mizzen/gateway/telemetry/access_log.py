"""The access log: one line of JSON a request, on standard output; the process's own log is on standard error.

A thread writes them, so that whoever reads slowly holds up no request; lines that find no room are counted,
and the count is written once there is some. Prompts and answers are not in it. `--access-log prompts` adds
the prompt, for whoever may read it.
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
"""What Linux writes to a pipe in one piece (PIPE_BUF): several processes write to one output."""
MAX_QUEUED_LINES = 4096
"""Lines that wait to be written."""


class AccessLogLine(msgspec.Struct, omit_defaults=True):
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
    """Writes a line for each request that has ended. Used from one thread."""

    def __init__(self, prompts: bool, stream: BinaryIO | None = None) -> None:
        self.prompts = prompts
        self._stream = stream or sys.stdout.buffer
        self._encode = msgspec.json.Encoder().encode
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED_LINES)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def write(self, record: RequestRecord) -> None:
        """Have a request's line written."""
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
        """Wait until all lines are written, for so long at most."""
        if self._thread is None:
            return
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)
        self._thread = None

    def _run(self) -> None:
        together = b""
        while (line := self._waiting.get()) is not None:
            if together and len(together) + len(line) > ATOMIC_WRITE_BYTES:
                self._put(together)
                together = b""
            together += line
            if self._waiting.empty():
                self._put(together)
                together = b""
        self._put(together)

    def _put(self, lines: bytes) -> None:
        try:
            self._stream.write(lines)
            self._stream.flush()
        except (OSError, ValueError):  # whoever read the log is gone: requests are served all the same
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
    """Return a Unix time as RFC 3339, with milliseconds."""
    return datetime.fromtimestamp(clock, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
