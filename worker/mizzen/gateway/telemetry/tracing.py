# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry traces of requests, exported by OTLP over HTTP if an endpoint is set.

Spans are created from a request's record after the request has ended, so tracing does not delay tokens.
OpenTelemetry is only imported if tracing is on.

    POST /v1/chat/completions      server span, child of the client's `traceparent`
      queue                        waiting for an engine
      tokenize                     template and tokenizer
      route                        choosing the engine
      engine                       one per attempt, until its last token, with engine and routing reason
        engine.request             the engine's own spans (see `mizzen.server.tracing`)

The engine gets the trace context of the span `engine` with the request, if the trace is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from mizzen.common.otlp import HeadersFile, TracingUnavailable, traces_endpoint
from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.telemetry.request_record import RequestRecord


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


def start_tracing(config: GatewayConfig, on_drop: Callable[[int], None]) -> Tracing | None:
    """Return the tracing of a gateway's requests, or None if no endpoint is set.

    `on_drop` is called with numbers of spans that could not be exported, from any thread.

    Raises:
        TracingUnavailable: an endpoint is set, but OpenTelemetry is not installed.
    """
    url = traces_endpoint(config.otlp_endpoint)
    if not url:
        return None
    try:
        from mizzen.gateway.telemetry.spans import OpenTelemetry
    except ImportError as error:
        raise TracingUnavailable(url, error.name) from error
    headers = HeadersFile(config.otlp_headers_file)
    return OpenTelemetry(url, headers, config.service or config.served_name, on_drop)
