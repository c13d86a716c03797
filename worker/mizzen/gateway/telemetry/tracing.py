"""OpenTelemetry traces of requests, sent by OTLP over HTTP where an endpoint is set.

A request carries its times in its record; its spans are made from them when it has ended, so tracing costs
the path of a token nothing, and nothing at all is imported or done while it is off.

    POST /v1/chat/completions      server span, the child of the client's `traceparent`
      queue                        waiting for an engine
      tokenize                     template and tokenizer
      route                        choosing the engine
      engine                       one an attempt, from sending to its last token: which engine, and why
        prefill                    until the first token: the engine's queue and the prompt
        decode                     from the first token to the last
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from mizzen.gateway.telemetry.request_record import Attempt, Record

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
FLUSH_SECONDS = 3.0
"""How long the last spans get to leave at the end of the process."""
NANO = 1_000_000_000
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""What OpenTelemetry's conventions call an endpoint's work."""


class Tracing(Protocol):
    """Makes the spans of requests."""

    def begin(self, record: Record, headers: Mapping[bytes, bytes]) -> Any:
        """Begin a request's root span and return it; sets the record's trace context where it is sampled."""
        ...

    def end(self, record: Record, root: Any, path: str) -> None:
        """Make a request's other spans, and end the root; `path` is one of the API's, or `other`."""
        ...

    def close(self) -> None:
        """Send what is left, in a bounded time."""
        ...


class TracingUnavailable(ValueError):
    """Tracing is asked for and OpenTelemetry is not installed."""


def traces_endpoint(endpoint: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the URL that spans are posted to, or nothing when tracing is off.

    `endpoint` is the collector's base URL, as in OTEL_EXPORTER_OTLP_ENDPOINT, which counts where it is empty.
    """
    if endpoint:
        return endpoint.rstrip("/") + "/v1/traces"
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    whole, base = (environment.get(name, "") for name in VARIABLES)
    return whole or (base.rstrip("/") + "/v1/traces" if base else "")


def start_tracing(endpoint: str, service: str) -> Tracing | None:
    """Return what traces requests, or None when no endpoint is set.

    Raises:
        TracingUnavailable: an endpoint is set, and the packages are missing.
    """
    url = traces_endpoint(endpoint)
    if not url:
        return None
    try:
        from mizzen.gateway.telemetry.spans import OpenTelemetry
    except ImportError as error:
        raise TracingUnavailable(
            f"tracing to {url} needs OpenTelemetry ({error.name} is missing): pip install 'mizzen[tracing]', "
            "or unset OTEL_EXPORTER_OTLP_ENDPOINT"
        ) from error
    return OpenTelemetry(url, service)


def attributes(record: Record) -> dict[str, Any]:
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
    if record.tried:
        found["gen_ai.usage.input_tokens"] = record.prompt_tokens
        found["gen_ai.usage.output_tokens"] = record.completion_tokens
        found["mizzen.usage.cached_tokens"] = record.cached_tokens
        found["mizzen.attempts"] = record.tried
    if record.finish_reasons:
        found["gen_ai.response.finish_reasons"] = record.finish_reasons
    if record.key:
        found["mizzen.key"] = record.key
    if record.first_token_seconds is not None:
        found["gen_ai.server.time_to_first_token"] = record.first_token_seconds
    if record.error:
        found["error.type"] = record.error
    return found


def nanoseconds(record: Record, moment: float) -> int:
    """Return a moment of the monotonic clock as nanoseconds of Unix time, as this request sees both."""
    return int((record.clock + (moment - record.began)) * NANO)


def parts(record: Record, attempt: Attempt) -> list[tuple[str, float, float]]:
    """Return the names, starts and ends of what an attempt consists of."""
    ended = record.ended if attempt.ended is None else attempt.ended
    if attempt.first_token is None:
        return [("prefill", attempt.sent, ended)]
    return [("prefill", attempt.sent, attempt.first_token), ("decode", attempt.first_token, ended)]
