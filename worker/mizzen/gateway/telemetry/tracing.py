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

from mizzen.gateway.telemetry.request_record import RequestRecord

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Tracing(Protocol):
    """Makes the spans of requests."""

    def begin(self, record: RequestRecord, headers: Mapping[bytes, bytes]) -> Any:
        """Begin a request's root span and return it; sets the record's trace context where it is sampled."""
        ...

    def end(self, record: RequestRecord, root: Any, path: str) -> None:
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
