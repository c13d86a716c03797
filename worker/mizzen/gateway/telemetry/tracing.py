"""OpenTelemetry traces of requests, exported by OTLP over HTTP if an endpoint is set.

Spans are created from a request's record after the request has ended, so tracing does not delay tokens.
OpenTelemetry is only imported if tracing is on.

    POST /v1/chat/completions      server span, child of the client's `traceparent`
      queue                        waiting for an engine
      tokenize                     template and tokenizer
      route                        choosing the engine
      engine                       one per attempt, until its last token, with engine and routing reason
        prefill                    until the first token: the engine's queue and the prefill
        decode                     from the first token to the last
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from mizzen.gateway.telemetry.request_record import RequestRecord

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Tracing(Protocol):
    """Interface to tracing of requests; see `mizzen.gateway.telemetry.spans.OpenTelemetry`."""

    def begin(self, record: RequestRecord, headers: Mapping[bytes, bytes]) -> Any:
        """Start and return a request's root span; if it is sampled, set the record's `traceparent`."""
        ...

    def end(self, record: RequestRecord, root_span: Any, path: str) -> None:
        """Create a request's child spans, and end its root span; `path` is a path template, or `other`."""
        ...

    def close(self) -> None:
        """Export the remaining spans, for a few seconds at most."""
        ...


class TracingUnavailable(ValueError):
    """Tracing is configured, but OpenTelemetry is not installed."""


def traces_endpoint(endpoint: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the URL to which spans are posted, or "" if tracing is off.

    `endpoint` is the base URL of the collector. If it is empty, the variables OTEL_SDK_DISABLED,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and OTEL_EXPORTER_OTLP_ENDPOINT of `environment` decide.
    """
    if endpoint:
        return endpoint.rstrip("/") + "/v1/traces"
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    traces_url, base = (environment.get(name, "") for name in VARIABLES)
    return traces_url or (base.rstrip("/") + "/v1/traces" if base else "")


def start_tracing(endpoint: str, service: str) -> Tracing | None:
    """Return the tracing of a service's requests, or None if no endpoint is set.

    Raises:
        TracingUnavailable: an endpoint is set, but OpenTelemetry is not installed.
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
