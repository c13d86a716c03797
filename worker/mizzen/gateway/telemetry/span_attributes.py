# SPDX-License-Identifier: Apache-2.0
"""Names, times and attributes of spans, computed from a request's record.

`spans` uses this module, which does not import OpenTelemetry.
"""

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
"""Operation name of each endpoint in OpenTelemetry's GenAI conventions."""


def root_attributes(record: RequestRecord) -> dict[str, Any]:
    """Return the attributes of a request's root span, named by OpenTelemetry's conventions."""
    attributes: dict[str, Any] = {
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "url.path": record.path[:256],
        "mizzen.request.id": record.request_id,
    }
    if record.model:
        attributes["gen_ai.request.model"] = record.model[:256]
        if record.path in OPERATIONS:
            attributes["gen_ai.operation.name"] = OPERATIONS[record.path]
        attributes["mizzen.stream"] = record.stream
    if record.attempt_count:
        attributes["gen_ai.usage.input_tokens"] = record.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = record.completion_tokens
        attributes["mizzen.usage.cached_tokens"] = record.cached_tokens
        attributes["mizzen.attempts"] = record.attempt_count
    if record.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = record.finish_reasons
    if record.key:
        attributes["mizzen.key"] = record.key
    if record.first_token_seconds is not None:
        attributes["gen_ai.server.time_to_first_token"] = record.first_token_seconds
    if record.error:
        attributes["error.type"] = record.error
    return attributes


def unix_nanoseconds(record: RequestRecord, moment: float) -> int:
    """Convert a moment on the monotonic clock (seconds) to Unix time (nanoseconds).

    The record holds the time of the request's arrival on both clocks.
    """
    return int((record.clock + (moment - record.began)) * NANO)


def attempt_attributes(attempt: AttemptRecord) -> dict[str, Any]:
    """Return the attributes of an attempt's span."""
    attributes: dict[str, Any] = {"engine.name": attempt.engine, "route.reason": attempt.reason}
    if attempt.engine_seconds > 0:
        attributes["engine.first_token_seconds"] = attempt.engine_seconds
    return attributes
