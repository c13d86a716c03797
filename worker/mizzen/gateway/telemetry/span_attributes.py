"""MODULE."""

from __future__ import annotations

from typing import Any

from mizzen.gateway.telemetry.request_record import AttemptRecord, RequestRecord

NANO = 1_000_000_000


OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""What OpenTelemetry's conventions call an endpoint's work."""


def root_attributes(record: RequestRecord) -> dict[str, Any]:
    """Return the attributes of a request's root span, named by OpenTelemetry's conventions."""
    found: dict[str, Any] = {
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "url.path": record.path[:256],
        "mizzen.request.id": record.request_id,
    }
    if record.model:
        found["gen_ai.request.model"] = record.model[:256]
        if record.path in OPERATIONS:
            found["gen_ai.operation.name"] = OPERATIONS[record.path]
        found["mizzen.stream"] = record.stream
    if record.attempt_count:
        found["gen_ai.usage.input_tokens"] = record.prompt_tokens
        found["gen_ai.usage.output_tokens"] = record.completion_tokens
        found["mizzen.usage.cached_tokens"] = record.cached_tokens
        found["mizzen.attempts"] = record.attempt_count
    if record.finish_reasons:
        found["gen_ai.response.finish_reasons"] = record.finish_reasons
    if record.key:
        found["mizzen.key"] = record.key
    if record.first_token_seconds is not None:
        found["gen_ai.server.time_to_first_token"] = record.first_token_seconds
    if record.error:
        found["error.type"] = record.error
    return found


def unix_nanoseconds(record: RequestRecord, moment: float) -> int:
    """Return a moment of the monotonic clock as nanoseconds of Unix time, as this request sees both."""
    return int((record.clock + (moment - record.began)) * NANO)


def attempt_parts(record: RequestRecord, attempt: AttemptRecord) -> list[tuple[str, float, float]]:
    """Return the names, starts and ends of what an attempt consists of."""
    ended = record.ended if attempt.ended is None else attempt.ended
    if attempt.first_token is None:
        return [("prefill", attempt.sent, ended)]
    return [("prefill", attempt.sent, attempt.first_token), ("decode", attempt.first_token, ended)]
