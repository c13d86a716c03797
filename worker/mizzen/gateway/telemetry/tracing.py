"""OpenTelemetry traces of requests, exported by OTLP over HTTP if an endpoint is set.

Spans are made from a request's record after it has ended, so tracing adds nothing to the path of a token.
While tracing is off, nothing of OpenTelemetry is imported.

    POST /v1/chat/completions      server span, child of the client's `traceparent`
      queue                        waiting for an engine
      tokenize                     template and tokenizer
      route                        choosing the engine
      engine                       one per attempt, until its last token: which engine, and why
        prefill                    until the first token: the engine's queue and the prompt
        decode                     from the first token to the last
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from mizzen.gateway.telemetry.request_record import RequestRecord

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Tracing(Protocol):
    """Interface to what makes the spans of requests."""

    def begin(self, record: RequestRecord, headers: Mapping[bytes, bytes]) -> Any:
        """Start a request's root span and return it; set the record's trace context if it is sampled."""
        ...

    def end(self, record: RequestRecord, root_span: Any, path: str) -> None:
        """Make a request's other spans, and end the root span; `path` is a path template, or `other`."""
        ...

    def close(self) -> None:
        """Export the remaining spans, in a bounded time."""
        ...


class TracingUnavailable(ValueError):
    """Tracing is configured but OpenTelemetry is not installed."""


def traces_endpoint(endpoint: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the URL that spans are posted to, or "" if tracing is off.

    `endpoint` is the collector's base URL; if empty, OTEL_EXPORTER_OTLP_ENDPOINT and its variants apply.
    """
    if endpoint:
        return endpoint.rstrip("/") + "/v1/traces"
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    traces_url, base = (environment.get(name, "") for name in VARIABLES)
    return traces_url or (base.rstrip("/") + "/v1/traces" if base else "")


def start_tracing(endpoint: str, service: str) -> Tracing | None:
    """Return the tracing of requests, or None if no endpoint is set.

    Raises:
        TracingUnavailable: an endpoint is set but the packages are missing.
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
