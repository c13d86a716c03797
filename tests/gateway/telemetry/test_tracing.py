"""Traces that a collector receives by OTLP over HTTP: spans, their nesting and their attributes."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from mizzen.gateway.telemetry.tracing import traces_endpoint

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from mizzen.gateway.telemetry import spans

BODY = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """An HTTP server that receives spans like an OpenTelemetry collector."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path == "/v1/traces":
                    collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, message: ExportTraceServiceRequest) -> None:
        for resource_spans in message.resource_spans:
            self.resource = attributes(resource_spans.resource)
            self.spans += [span for scope in resource_spans.scope_spans for span in scope.spans]

    @property
    def root(self) -> Any:
        return next((span for span in self.spans if span.name.startswith("POST")), None)

    def children(self, parent: Any) -> dict[str, list[Any]]:
        by_parent = defaultdict(list)
        for span in self.spans:
            if span.parent_span_id == parent.span_id:
                by_parent[span.name].append(span)
        return by_parent

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes(owner: Any) -> dict[str, Any]:
    values = {}
    for pair in owner.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        values[pair.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return values


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    new_collector = Collector()
    yield new_collector
    new_collector.close()


async def post(gateway: Any, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(
            f"{gateway.url}/v1/chat/completions", json={**BODY, **body}, headers=headers or {}
        )


async def test_request_becomes_a_trace(scripted: Any, live: Any, until: Any, collector: Collector) -> None:
    engine = scripted()
    engine.does.cached_tokens = 16
    gateway = await live(engine, otlp_endpoint=collector.url, service="chat")
    await post(gateway, stream=True)
    await until(lambda: collector.root)
    root = collector.root
    assert root.name == "POST /v1/chat/completions"
    assert collector.resource["service.name"] == "mizzen-gateway"
    assert collector.resource["mizzen.service"] == "chat"
    root_attributes = attributes(root)
    assert root_attributes["http.response.status_code"] == 200
    assert root_attributes["gen_ai.request.model"] == "demo"
    assert root_attributes["gen_ai.operation.name"] == "chat"
    assert root_attributes["gen_ai.usage.output_tokens"] == 3
    assert root_attributes["gen_ai.usage.input_tokens"] == len(engine.requests[0].prompt) // 4
    assert root_attributes["mizzen.usage.cached_tokens"] == 16
    assert root_attributes["gen_ai.response.finish_reasons"] == ["length"]
    children = collector.children(root)
    assert sorted(children) == ["engine", "queue", "route", "tokenize"]
    (attempt,) = children["engine"]
    assert attributes(attempt)["route.reason"] == "only"
    assert attributes(attempt)["engine.first_token_seconds"] == 0.125
    parts = collector.children(attempt)
    assert sorted(parts) == ["decode", "prefill"]
    assert parts["prefill"][0].end_time_unix_nano == parts["decode"][0].start_time_unix_nano
    for parent, inner in ((root, children), (attempt, parts)):
        for span in (inner_span for several in inner.values() for inner_span in several):
            assert span.trace_id == root.trace_id
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            assert span.start_time_unix_nano <= span.end_time_unix_nano <= parent.end_time_unix_nano


async def test_trace_continues_the_clients_trace(
    scripted: Any, live: Any, until: Any, collector: Collector
) -> None:
    gateway = await live(scripted(), otlp_endpoint=collector.url)
    await post(gateway, {"traceparent": f"00-{TRACE}-{PARENT}-01"})
    await until(lambda: collector.root)
    assert collector.root.trace_id.hex() == TRACE
    assert collector.root.parent_span_id.hex() == PARENT


@pytest.mark.parametrize(
    "traceparent", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 4000, "é"]
)
async def test_invalid_trace_context_starts_a_new_trace(
    traceparent: str, scripted: Any, live: Any, until: Any, collector: Collector
) -> None:
    gateway = await live(scripted(), otlp_endpoint=collector.url)
    answer = await post(gateway, {"traceparent": traceparent.encode()})  # type: ignore[dict-item]
    assert answer.status_code == 200
    await until(lambda: collector.root)
    assert not collector.root.parent_span_id


async def test_unsampled_client_trace_is_not_exported(
    scripted: Any, live: Any, until: Any, collector: Collector
) -> None:
    gateway = await live(scripted(), otlp_endpoint=collector.url)
    await post(gateway, {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    await post(gateway)
    await until(lambda: collector.root)
    assert TRACE not in {span.trace_id.hex() for span in collector.spans}


async def test_failures_are_errors_and_every_attempt_has_a_span(
    scripted: Any, live: Any, until: Any, collector: Collector
) -> None:
    engine = scripted()
    engine.does.fault, engine.does.fault_after = "error", 0
    gateway = await live(engine, otlp_endpoint=collector.url, max_attempts=2)
    assert (await post(gateway)).status_code == 503
    await until(lambda: collector.root)
    assert collector.root.status.code == 2
    assert attributes(collector.root)["error.type"] == "engine_lost"
    attempts = collector.children(collector.root)["engine"]
    assert [attempt.status.message for attempt in attempts] == ["engine_error"] * 2
    assert "decode" not in collector.children(attempts[0])


async def test_remaining_spans_are_exported_at_shutdown(
    scripted: Any, live: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    gateway = await live(scripted(), otlp_endpoint=collector.url)
    await post(gateway)
    await gateway.stop()
    assert collector.root is not None


async def test_unresponsive_collector_does_not_delay_shutdown(
    scripted: Any, live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK waits up to 10 s per batch for its exporter; at shutdown, the gateway limits this wait."""
    monkeypatch.setattr(spans, "FLUSH_SECONDS", 0.1)
    ended, answer = threading.Event(), threading.Event()

    def export(*_: object) -> None:
        answer.wait(60)
        ended.set()

    monkeypatch.setattr(spans.OTLPSpanExporter, "export", export)
    gateway = await live(scripted(), otlp_endpoint="http://127.0.0.1:9")
    await post(gateway)
    await gateway.stop()
    assert not ended.is_set()
    answer.set()


async def test_unknown_paths_name_no_span(scripted: Any, live: Any, until: Any, collector: Collector) -> None:
    gateway = await live(scripted(), otlp_endpoint=collector.url)
    async with httpx.AsyncClient(timeout=60) as http:
        await http.get(f"{gateway.url}/v1/models/no-such-model")
        await http.post(f"{gateway.url}/v1/no-such-path")
    await until(lambda: len(collector.spans) == 2)
    assert {span.name for span in collector.spans} == {"GET /v1/models/{name:path}", "POST"}
    assert {attributes(span)["url.path"] for span in collector.spans} == {
        "/v1/models/no-such-model",
        "/v1/no-such-path",
    }


async def test_missing_collector_stops_nothing(scripted: Any, live: Any) -> None:
    gateway = await live(scripted(), otlp_endpoint="http://127.0.0.1:9")
    assert (await post(gateway)).status_code == 200


@pytest.mark.parametrize(
    ("option", "environment", "expected"),
    [
        ("", {}, ""),
        ("http://c:4318/", {}, "http://c:4318/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, "http://c:4318/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/here"}, "http://c/here"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, ""),
    ],
)
def test_traces_endpoint_from_options_and_environment(
    option: str, environment: dict[str, str], expected: str
) -> None:
    assert traces_endpoint(option, environment) == expected


def test_opentelemetry_is_not_imported_while_tracing_is_off() -> None:
    code = """
import sys
from mizzen.gateway.app import create_app
from mizzen.gateway.config import GatewayConfig
create_app(GatewayConfig(served_name="demo"))
sys.exit("; ".join(name for name in sys.modules if name.startswith("opentelemetry.sdk")) or 0)
"""
    environment = {"PATH": "/usr/bin"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    assert run.returncode == 0, run.stderr
