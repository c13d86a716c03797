# SPDX-License-Identifier: Apache-2.0
"""Exports spans with OpenTelemetry's SDK. This module is only imported if tracing is on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import Tracer
from requests.auth import AuthBase

from mizzen.common.otlp import HeadersFile

FLUSH_SECONDS = 3.0
"""Maximum time for exporting the last spans when the process ends."""
EXPORT_SECONDS = 10.0
"""Maximum time for exporting one batch, including retries."""


class SpanExport:
    """Exports spans in batches, in a thread; drops and counts spans that it cannot export in time."""

    def __init__(
        self,
        url: str,
        headers: HeadersFile,
        *,
        program: str,
        version: str,
        instance: str = "",
        resource: Mapping[str, str],
        on_drop: Callable[[int], None],
        sampler: Sampler | None = None,
        ids: IdGenerator | None = None,
    ) -> None:
        """Start the thread that exports spans.

        Args:
            url: URL to which spans are posted.
            headers: headers of the requests.
            program: value of the resource attribute `service.name`.
            version: version of the program.
            instance: value of the resource attribute `service.instance.id`; random if empty.
            resource: further attributes of the resource; OTEL_RESOURCE_ATTRIBUTES overrides them, and empty
                ones are omitted.
            on_drop: called with a number of spans that were dropped, because the queue was full or the
                collector did not accept them; from any thread.
            sampler: decides which new traces are recorded; by default as OTEL_TRACES_SAMPLER says.
            ids: generator of trace and span ids; random ids by default.
        """
        names = {"service.name": program, "service.version": version}
        named = Resource.create(names | ({"service.instance.id": instance} if instance else {}))
        further = Resource({name: value for name, value in resource.items() if value})
        self._provider = TracerProvider(
            sampler, further.merge(named), shutdown_on_exit=False, id_generator=ids
        )
        queue = _QueueSize()
        exporter = _CountingExporter(url, headers, queue, on_drop)
        self._provider.add_span_processor(_BoundedProcessor(exporter, queue, on_drop))
        self.tracer: Tracer = self._provider.get_tracer(program.replace("-", "."), version)

    def close(self) -> None:
        """Export the remaining spans, for at most `FLUSH_SECONDS`."""
        # The SDK's shutdown ignores its timeout: it exports for as long as the collector takes.
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(FLUSH_SECONDS)


class _QueueSize:
    """Number of spans in the queue of the SDK. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans = 0

    def add_one(self, limit: int) -> bool:
        """Count a span that enters the queue; return False if the queue already holds `limit` spans."""
        with self._lock:
            if self._spans >= limit:
                return False
            self._spans += 1
            return True

    def remove(self, spans: int) -> None:
        """Count spans that leave the queue."""
        with self._lock:
            self._spans -= spans


class _BoundedProcessor(BatchSpanProcessor):
    """The SDK's batching, which also reports spans that do not fit into the queue."""

    def __init__(self, exporter: SpanExporter, queue: _QueueSize, on_drop: Callable[[int], None]) -> None:
        super().__init__(exporter)
        self._queue_size, self._on_drop = queue, on_drop
        self._limit = self._default_max_queue_size()

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span that has ended, or drop it if the queue is full."""
        context = span.get_span_context()
        if context is None or not context.trace_flags.sampled:
            return
        if self._queue_size.add_one(self._limit):
            super().on_end(span)
        else:
            self._on_drop(1)


class _CountingExporter(SpanExporter):
    """Posts batches, with the headers that the file holds at that time, and reports failures."""

    def __init__(
        self, url: str, headers: HeadersFile, queue: _QueueSize, on_drop: Callable[[int], None]
    ) -> None:
        session = requests.Session()
        session.auth = _FileHeaders(headers)  # it also keeps the session from reading a .netrc file
        session.hooks["response"].append(_refuse_redirect)
        self._queue_size, self._on_drop = queue, on_drop
        self._exporter = OTLPSpanExporter(url, timeout=EXPORT_SECONDS, session=session)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Post a batch; report its spans as dropped if the collector does not accept them."""
        self._queue_size.remove(len(spans))
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self._on_drop(len(spans))
        return result

    def shutdown(self) -> None:
        """Close the connections to the collector."""
        self._exporter.shutdown()


def _refuse_redirect(response: requests.Response, *_: object, **__: object) -> None:
    """Fail for a redirect, which the SDK counts as success although the collector has taken no spans.

    Redirects are not followed, because another server would get the spans and the headers.
    """
    if 300 <= response.status_code < 400:
        status = response.status_code
        raise requests.TooManyRedirects(
            f"the collector redirects (status {status}); use the URL to which it redirects as the endpoint"
        )


class _FileHeaders(AuthBase):
    """Adds the headers of a file to a request, after all other headers."""

    def __init__(self, headers: HeadersFile) -> None:
        self._headers = headers

    def __call__(self, r: requests.PreparedRequest) -> requests.PreparedRequest:
        r.headers.update(self._headers.read())
        return r
