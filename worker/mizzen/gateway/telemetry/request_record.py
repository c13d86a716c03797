# SPDX-License-Identifier: Apache-2.0
"""Record of one request, for the access log, metrics and traces; an update is a few assignments."""

from __future__ import annotations

import random
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

RECORD_KEY = "mizzen.record"
NO_STATUS = 499
"""Recorded status of a request whose client disconnected before the response began."""
MAX_PROMPT_CHARACTERS = 32_768
"""Maximum number of characters of a prompt (as JSON) in the access log; longer prompts are truncated."""
MAX_ATTEMPTS = 32
"""Maximum number of attempts, and of phases, in a record; further attempts are only counted."""


@dataclass(slots=True)
class AttemptRecord:
    """Record of a request's time in one engine. Points in time are seconds of the monotonic clock."""

    engine: str
    reason: str
    """Reason for routing the request to this engine."""
    sent: float
    first_token: float | None = None
    ended: float | None = None
    engine_seconds: float = 0.0
    """Time to the first token as the engine measured it, in seconds; 0 if the engine did not report it."""
    error: str = ""
    """Reason why the engine did not finish the request, in one word; empty if it did."""
    span_id: int = 0
    """Id of the attempt's span; 0 if the request is not traced."""
    traceparent: str = ""
    """W3C trace context of the attempt's span, for the engine; empty if the request is not traced."""

    def end(self, error: str = "", engine_seconds: float = 0.0) -> None:
        """Record that the engine no longer has the request; only the first call counts."""
        if self.ended is None:
            self.ended, self.error, self.engine_seconds = time.monotonic(), error, engine_seconds


@dataclass(slots=True)
class RequestPhase:
    """Named phase of a request, such as `queue`; times are seconds of the monotonic clock."""

    name: str
    began: float
    ended: float


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Record of a request, from its arrival to its last byte."""

    request_id: str
    method: str
    path: str
    began: float = field(default_factory=time.monotonic)
    clock: float = field(default_factory=time.time)
    """Unix time that corresponds to `began`."""
    traceparent: str = ""
    """W3C trace context of the request's span; empty if it is not traced."""
    model: str = ""
    key: str = ""
    """Name of the API key, never the key itself."""
    stream: bool = False
    status: int = NO_STATUS
    """HTTP status of the response."""
    keeps_prompt: bool = False
    """True if the access log includes the prompt."""
    prompt: Any = None
    """Messages or prompt of the request; only set if `keeps_prompt` is true."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token: float | None = None
    ended: float = 0.0
    finish_reasons: list[str] = field(default_factory=list)
    """Finish reason of each choice."""
    ignored_fields: tuple[str, ...] = ()
    """Paths of the body's fields that are ignored."""
    error: str = ""
    """Error code or one-word cause, such as `client_gone`; empty if the request did not fail."""
    attempts: list[AttemptRecord] = field(default_factory=list)
    attempt_count: int = 0
    """Number of attempts, including attempts beyond `MAX_ATTEMPTS`."""
    phases: list[RequestPhase] = field(default_factory=list)

    def keep_prompt(self, prompt: Any) -> None:
        """Keep a prompt for the access log; truncate token ids to the first `MAX_PROMPT_CHARACTERS` ids."""
        self.prompt = prompt[:MAX_PROMPT_CHARACTERS].tolist() if isinstance(prompt, array) else prompt

    def end_phase(self, name: str, began: float) -> None:
        """Record a phase that began at `began` and ends now."""
        if len(self.phases) < MAX_ATTEMPTS:
            self.phases.append(RequestPhase(name, began, time.monotonic()))

    def new_attempt(self, engine: str, reason: str) -> AttemptRecord:
        """Return the record of an attempt that begins now; `add_attempt` adds it to this record."""
        attempt = AttemptRecord(engine, reason, time.monotonic())
        if self.traceparent and len(self.attempts) < MAX_ATTEMPTS:
            attempt.span_id = random.randrange(1, 2**64)
            attempt.traceparent = f"{self.traceparent[:36]}{attempt.span_id:016x}{self.traceparent[52:]}"
        return attempt

    def add_attempt(self, attempt: AttemptRecord) -> None:
        """Record an attempt whose request was sent to the engine."""
        self.attempt_count += 1
        if len(self.attempts) < MAX_ATTEMPTS:
            self.attempts.append(attempt)

    def first_token_received(self, attempt: AttemptRecord) -> None:
        """Record that the first token of an attempt has arrived."""
        attempt.first_token = now = time.monotonic()
        if self.first_token is None:
            self.first_token = now

    @property
    def seconds(self) -> float:
        """Seconds from the request's arrival to the last byte of its response."""
        return self.ended - self.began

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds from the request's arrival to its first token; None if it got no token."""
        return None if self.first_token is None else self.first_token - self.began

    @property
    def added_seconds(self) -> float | None:
        """Part of `first_token_seconds` spent in the gateway itself, not in its queue or the engine.

        None if there is no first token, if there were several attempts, or if the engine did not report its
        time.
        """
        if self.first_token is None or self.attempt_count != 1 or not self.attempts[0].engine_seconds:
            return None
        queued = sum(phase.ended - phase.began for phase in self.phases if phase.name == "queue")
        return max(0.0, self.first_token - self.began - queued - self.attempts[0].engine_seconds)


def get_record(scope: Scope) -> RequestRecord:
    """Return the record of a request; outside `RequestMiddleware`, create one that is not reported."""
    record = scope.get(RECORD_KEY)
    if not isinstance(record, RequestRecord):
        record = RequestRecord(request_id="", method=scope.get("method", ""), path=scope.get("path", ""))
        scope[RECORD_KEY] = record
    return record
