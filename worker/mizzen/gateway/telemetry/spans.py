"""Traces requests with OpenTelemetry's SDK. This module is only imported if tracing is on."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mizzen import __version__
from mizzen.gateway.telemetry.fast_metrics import OTHER_LABEL
from mizzen.gateway.telemetry.request_record import AttemptRecord, RequestRecord
from mizzen.gateway.telemetry.span_attributes import attempt_parts, root_attributes, unix_nanoseconds

FLUSH_SECONDS = 3.0
"""Maximum time for exporting the last spans when the process ends."""
MAX_HEADER_BYTES = 512
"""Maximum length of the headers `traceparent` and `tracestate`; longer headers are ignored."""


class OpenTelemetry:
    """Creates spans, and exports them in batches in a thread; drops spans that it cannot export in time.

    A request is traced if its header `traceparent` says so; without the header, OTEL_TRACES_SAMPLER decides.
    """

    def __init__(self, url: str, service: str) -> None:
        resource = Resource.create({"service.name": "mizzen-gateway", "service.version": __version__})
        resource = Resource({"mizzen.service": service}).merge(resource) if service else resource
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=10)))
        self._tracer = self._provider.get_tracer("mizzen.gateway", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, record: RequestRecord, headers: Mapping[bytes, bytes]) -> Span:
        """Start and return a request's root span; if it is sampled, set the record's `traceparent`."""
        carrier: dict[str, str] = {}
        for name in ("traceparent", "tracestate"):
            value = headers.get(name.encode(), b"")
            if 0 < len(value) <= MAX_HEADER_BYTES and value.isascii():
                carrier[name] = value.decode()
        context = self._propagator.extract(carrier, Context())
        start = unix_nanoseconds(record, record.began)
        root_span = self._tracer.start_span(record.method, context, SpanKind.SERVER, start_time=start)
        if root_span.is_recording():
            self._propagator.inject(carrier, set_span_in_context(root_span, Context()))
            record.traceparent = carrier["traceparent"]
        return root_span

    def end(self, record: RequestRecord, root_span: Span, path: str) -> None:
        """Create a request's child spans, and end its root span; `path` is a path template, or `other`."""
        if root_span.is_recording():
            if path != OTHER_LABEL:  # unknown paths must not become span names: collectors count by name
                root_span.update_name(f"{record.method} {path}")
                root_span.set_attribute("http.route", path)
            context = set_span_in_context(root_span, Context())
            for phase in record.phases:
                self._span(record, phase.name, context, phase.began, phase.ended)
            for attempt in record.attempts:
                self._attempt(record, attempt, context)
            root_span.set_attributes(root_attributes(record))
            if record.status >= 500 or record.error:
                root_span.set_status(Status(StatusCode.ERROR, record.error or None))
        root_span.end(unix_nanoseconds(record, record.ended))

    def close(self) -> None:
        """Export the remaining spans, for at most `FLUSH_SECONDS`."""
        # The SDK's shutdown ignores its timeout: it exports for as long as the collector takes.
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(FLUSH_SECONDS)

    def _attempt(self, record: RequestRecord, attempt: AttemptRecord, context: Context) -> None:
        ended = record.ended if attempt.ended is None else attempt.ended
        span = self._tracer.start_span(
            "engine",
            context,
            SpanKind.CLIENT,
            {"engine.name": attempt.engine, "route.reason": attempt.reason},
            start_time=unix_nanoseconds(record, attempt.sent),
        )
        inside = set_span_in_context(span, Context())
        for name, began, end in attempt_parts(record, attempt):
            self._span(record, name, inside, began, end)
        if attempt.engine_seconds > 0:
            span.set_attribute("engine.first_token_seconds", attempt.engine_seconds)
        if attempt.error:
            span.set_status(Status(StatusCode.ERROR, attempt.error))
        span.end(unix_nanoseconds(record, ended))

    def _span(self, record: RequestRecord, name: str, context: Context, began: float, ended: float) -> None:
        span = self._tracer.start_span(name, context, start_time=unix_nanoseconds(record, began))
        span.end(unix_nanoseconds(record, ended))
