"""What is known of one request, for the access log and traces. Filling it costs a few assignments."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

RECORD_KEY = "mizzen.record"
NO_STATUS = 499
"""Of a request whose client left before there was a response."""
MAX_PROMPT_CHARACTERS = 32_768
"""Of the JSON of a prompt in the access log; the rest is cut off."""
MAX_ATTEMPTS = 32
"""Attempts that are kept; what comes after is counted only."""


@dataclass(slots=True)
class AttemptRecord:
    """A request's time in one engine. Times are seconds of the monotonic clock."""

    engine: str
    reason: str
    """Why it was routed there."""
    sent: float
    first_token: float | None = None
    ended: float | None = None
    engine_seconds: float = 0.0
    """Until its first token by the engine's own clock; 0 where the engine did not say."""
    error: str = ""
    """Why the engine did not finish it: one word."""

    def end(self, error: str = "", engine_seconds: float = 0.0) -> None:
        """Note that the engine has nothing of the request any more."""
        if self.ended is None:
            self.ended, self.error, self.engine_seconds = time.monotonic(), error, engine_seconds


@dataclass(slots=True)
class RequestPhase:
    """A named part of a request's time, on the monotonic clock."""

    name: str
    began: float
    ended: float


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """A request, from its arrival to its last byte."""

    request_id: str
    method: str
    path: str
    began: float = field(default_factory=time.monotonic)
    clock: float = field(default_factory=time.time)
    """Unix time of `began`."""
    traceparent: str = ""
    """W3C trace context of its span; empty where it is not traced."""
    model: str = ""
    key: str = ""
    """Name of the API key, never the key."""
    stream: bool = False
    status: int = NO_STATUS
    """Of the response."""
    keeps_prompt: bool = False
    """Whether the access log is to hold the prompt."""
    prompt: Any = None
    """Messages or prompt, where they are kept."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token: float | None = None
    ended: float = 0.0
    finish_reasons: list[str] = field(default_factory=list)
    """One a choice."""
    error: str = ""
    """What went wrong after the response had begun, or with the request: OpenAI's error code or a word."""
    attempts: list[AttemptRecord] = field(default_factory=list)
    attempt_count: int = 0
    """Attempts in all."""
    phases: list[RequestPhase] = field(default_factory=list)

    def keep_prompt(self, prompt: Any) -> None:
        """Keep a prompt for the access log, of token ids no more than it may show."""
        self.prompt = prompt[:MAX_PROMPT_CHARACTERS].tolist() if isinstance(prompt, array) else prompt

    def end_phase(self, name: str, began: float) -> None:
        """Note a part of the request's time that ends now."""
        if len(self.phases) < MAX_ATTEMPTS:
            self.phases.append(RequestPhase(name, began, time.monotonic()))

    def start_attempt(self, engine: str, reason: str) -> AttemptRecord:
        """Note that the request is sent to an engine; returns what the attempt fills."""
        attempt = AttemptRecord(engine, reason, time.monotonic())
        self.attempt_count += 1
        if len(self.attempts) < MAX_ATTEMPTS:
            self.attempts.append(attempt)
        return attempt

    def first_token_received(self, attempt: AttemptRecord) -> None:
        """Note the first token of an attempt."""
        attempt.first_token = now = time.monotonic()
        if self.first_token is None:
            self.first_token = now

    @property
    def seconds(self) -> float:
        """From its arrival to its last byte."""
        return self.ended - self.began

    @property
    def first_token_seconds(self) -> float | None:
        """From its arrival to its first token."""
        return None if self.first_token is None else self.first_token - self.began

    @property
    def added_seconds(self) -> float | None:
        """Time to the first token without the queue and the engine's own; None when nobody can tell."""
        if self.first_token is None or self.attempt_count != 1 or not self.attempts[0].engine_seconds:
            return None
        queued = sum(phase.ended - phase.began for phase in self.phases if phase.name == "queue")
        return max(0.0, self.first_token - self.began - queued - self.attempts[0].engine_seconds)


def get_record(scope: Scope) -> RequestRecord:
    """Return the record of a request; one that nobody reads where no front made it."""
    record = scope.get(RECORD_KEY)
    if not isinstance(record, RequestRecord):
        record = RequestRecord(request_id="", method=scope.get("method", ""), path=scope.get("path", ""))
        scope[RECORD_KEY] = record
    return record
