# SPDX-License-Identifier: Apache-2.0
"""Traces requests with OpenTelemetry's SDK. This module is only imported if tracing is on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mizzen import __version__
from mizzen.common.otlp import HeadersFile
from mizzen.common.span_export import SpanExport
from mizzen.gateway.telemetry.fast_metrics import OTHER_LABEL
from mizzen.gateway.telemetry.request_record import AttemptRecord, RequestRecord
from mizzen.gateway.telemetry.span_attributes import attempt_attributes, root_attributes, unix_nanoseconds

MAX_HEADER_BYTES = 512
"""Maximum length of the headers `traceparent` and `tracestate`; longer headers are ignored."""


class OpenTelemetry:
    """Creates the spans of requests; `SpanExport` exports them.

    A request is traced if its header `traceparent` says so; without the header, OTEL_TRACES_SAMPLER decides.
    """

    def __init__(self, url: str, headers: HeadersFile, service: str, on_drop: Callable[[int], None]) -> None:
        self._ids = _ChosenIds()
        self._export = SpanExport(
            url,
            headers,
            program="mizzen-gateway",
            version=__version__,
            resource={"mizzen.service": service},
            on_drop=on_drop,
            ids=self._ids,
        )
        self._tracer = self._export.tracer
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
        """Export the remaining spans, for a few seconds at most."""
        self._export.close()

    def _attempt(self, record: RequestRecord, attempt: AttemptRecord, context: Context) -> None:
        ended = record.ended if attempt.ended is None else attempt.ended
        self._ids.next_span_id = attempt.span_id
        span = self._tracer.start_span(
            "engine",
            context,
            SpanKind.CLIENT,
            attempt_attributes(attempt),
            start_time=unix_nanoseconds(record, attempt.sent),
        )
        if attempt.first_token is not None:
            span.add_event("first token", timestamp=unix_nanoseconds(record, attempt.first_token))
        if attempt.error:
            span.set_status(Status(StatusCode.ERROR, attempt.error))
        span.end(unix_nanoseconds(record, ended))

    def _span(self, record: RequestRecord, name: str, context: Context, began: float, ended: float) -> None:
        span = self._tracer.start_span(name, context, start_time=unix_nanoseconds(record, began))
        span.end(unix_nanoseconds(record, ended))


class _ChosenIds(RandomIdGenerator):
    """Random ids, except that the id of the next span can be chosen. For use from one thread.

    The engine gets the id of the span `engine` before the span is created.
    """

    def __init__(self) -> None:
        self.next_span_id = 0
        """Id of the next span; 0 for a random one."""

    def generate_span_id(self) -> int:
        """Return `next_span_id`, once, or a random id."""
        chosen, self.next_span_id = self.next_span_id, 0
        return chosen or super().generate_span_id()
