# SPDX-License-Identifier: Apache-2.0
"""An HTTP server that receives spans by OTLP, like an OpenTelemetry collector."""

from __future__ import annotations

import gzip
import json
import threading
from collections import defaultdict
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class SpanList:
    """Spans of one or several traces, and queries about them."""

    def __init__(self, spans: Iterable[Any] = ()) -> None:
        self.spans: list[Any] = list(spans)

    @property
    def root(self) -> Any:
        return next((span for span in self.spans if span.name.startswith("POST")), None)

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def children(self, parent: Any) -> dict[str, list[Any]]:
        by_name = defaultdict(list)
        for span in self.spans:
            if span.parent_span_id == parent.span_id:
                by_name[span.name].append(span)
        return by_name

    def check_nesting(self, tolerance_seconds: float = 0.0) -> None:
        """Check that every span is in the trace of its parent, and within its parent's time."""
        by_id = {span.span_id: span for span in self.spans}
        slack = int(tolerance_seconds * 1e9)
        for span in self.spans:
            assert span.start_time_unix_nano <= span.end_time_unix_nano, span.name
            parent = by_id.get(span.parent_span_id)
            if parent is None:
                continue
            assert parent.trace_id == span.trace_id
            assert parent.start_time_unix_nano - slack <= span.start_time_unix_nano, (parent.name, span.name)
            assert span.end_time_unix_nano <= parent.end_time_unix_nano + slack, (parent.name, span.name)

    def to_json(self) -> str:
        """Return the spans as one OTLP message in JSON, in which ids are hexadecimal."""
        spans = []
        for span in self.spans:
            ids = {"traceId": span.trace_id, "spanId": span.span_id, "parentSpanId": span.parent_span_id}
            fields = MessageToDict(span, use_integers_for_enums=True)
            spans.append(fields | {name: value.hex() for name, value in ids.items()})
        return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})


class Collector(SpanList):
    """A collector on a loopback port; it keeps all spans that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.resources: dict[bytes, dict[str, Any]] = {}
        """Attributes of the resource of each span, by span id."""
        self.resource: dict[str, Any] = {}
        """Attributes of the resource that was received last."""
        self.headers: list[dict[str, str]] = []
        """Headers of each request, by lower-case name."""
        self.status, self.location = 200, ""
        self.hangs = threading.Event()
        """While this is set, requests get no answer."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                while collector.hangs.is_set():
                    collector.closing.wait(0.05)
                    if collector.closing.is_set():
                        return
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                if self.path == "/v1/traces" and collector.status == 200:
                    collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                if collector.location:
                    self.send_header("location", collector.location)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, message: ExportTraceServiceRequest) -> None:
        for resource_spans in message.resource_spans:
            self.resource = attributes(resource_spans.resource)
            for scope in resource_spans.scope_spans:
                self.resources |= {span.span_id: self.resource for span in scope.spans}
                self.spans += scope.spans

    def trace(self, trace_id: str) -> SpanList:
        """Return the spans of one trace that have arrived so far."""
        return SpanList(span for span in list(self.spans) if span.trace_id.hex() == trace_id)

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of a span, event or resource."""
    values = {}
    for pair in owner.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        values[pair.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return values
