# SPDX-License-Identifier: Apache-2.0
"""Traces that a collector receives by OTLP over HTTP: spans, their nesting and their attributes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mizzen.common.otlp import TracingUnavailable, parse_headers, traces_endpoint
from mizzen.gateway.config import GatewayConfig

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from mizzen.common import span_export
from trace_collector import Collector, attributes

BODY = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


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
    assert [event.name for event in attempt.events] == ["first token"]
    assert attempt.start_time_unix_nano <= attempt.events[0].time_unix_nano <= attempt.end_time_unix_nano
    collector.check_nesting()
    # The engine gets the context of the span of its attempt.
    assert engine.requests[0].traceparent[:52] == f"00-{root.trace_id.hex()}-{attempt.span_id.hex()}"


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
    engine = scripted()
    gateway = await live(engine, otlp_endpoint=collector.url)
    await post(gateway, {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    await post(gateway)
    await until(lambda: collector.root)
    assert TRACE not in {span.trace_id.hex() for span in collector.spans}
    assert [bool(request.traceparent) for request in engine.requests] == [False, True]


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
    assert not attempts[0].events
    contexts = [request.traceparent for request in engine.requests]
    assert [context[36:52] for context in contexts] == [attempt.span_id.hex() for attempt in attempts]


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
    monkeypatch.setattr(span_export, "FLUSH_SECONDS", 0.1)
    ended, answer = threading.Event(), threading.Event()

    def export(*_: object) -> None:
        answer.wait(60)
        ended.set()

    monkeypatch.setattr(span_export.OTLPSpanExporter, "export", export)
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


async def test_missing_collector_stops_nothing(
    scripted: Any, live: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setattr(span_export, "EXPORT_SECONDS", 0.1)
    gateway = await live(scripted(), otlp_endpoint="http://127.0.0.1:9")
    assert (await post(gateway)).status_code == 200
    await until(lambda: b"mizzen_gateway_dropped_spans_total 5.0" in gateway.gateway.metrics.render())


async def test_headers_file_is_sent_to_the_collector(
    scripted: Any, live: Any, until: Any, collector: Collector, tmp_path: Any
) -> None:
    (tmp_path / "headers").write_text("authorization=Bearer%20secret\n")
    file = str(tmp_path / "headers")
    gateway = await live(scripted(), otlp_endpoint=collector.url, otlp_headers_file=file)
    await post(gateway)
    await until(lambda: collector.root)
    assert collector.headers[0]["authorization"] == "Bearer secret"


async def test_redirects_of_a_collector_are_failures(
    scripted: Any, live: Any, until: Any, collector: Collector, tmp_path: Any
) -> None:
    """The SDK takes a redirect for success; a followed one would send the headers to another server."""
    other = Collector()
    try:
        collector.status, collector.location = 307, f"{other.url}/v1/traces"
        (tmp_path / "headers").write_text("api-key=secret")
        file = str(tmp_path / "headers")
        gateway = await live(scripted(), otlp_endpoint=collector.url, otlp_headers_file=file)
        await post(gateway)
        await until(lambda: b"mizzen_gateway_dropped_spans_total 5.0" in gateway.gateway.metrics.render())
        assert collector.headers
        assert not other.headers
    finally:
        other.close()


async def test_a_netrc_file_is_not_read(
    scripted: Any, live: Any, until: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login user password secret")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    gateway = await live(scripted(), otlp_endpoint=collector.url)
    await post(gateway)
    await until(lambda: collector.root)
    assert "authorization" not in collector.headers[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (" a=b , C=d%2Ce,, f=g=h ", {"a": "b", "c": "d,e", "f": "g=h"}),
        ("a=", {"a": ""}),
        ("secret", "entry 1 is not NAME=VALUE"),
        ("a=b,bad name=secret", "entry 2 is not NAME=VALUE"),
        ("a=secret%0d%0ab: c", "the value of entry 1 is not printable ASCII"),
        ("a=secré", "the value of entry 1 is not printable ASCII"),
    ],
)
def test_headers_are_parsed_and_errors_do_not_reveal_them(text: str, expected: Any) -> None:
    if isinstance(expected, dict):
        assert parse_headers(text) == expected
        return
    with pytest.raises(ValueError, match=expected) as error:
        parse_headers(text)
    assert "secr" not in str(error.value)


def test_endpoint_must_be_an_http_url() -> None:
    with pytest.raises(ValueError, match="--otlp-endpoint must be an http:// or https:// URL"):
        GatewayConfig(served_name="demo", otlp_endpoint="collector:4318")


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


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
@pytest.mark.parametrize("value", ["otel:4317", "http://:4318", "http://user:secret@c:4318/v1"])
def test_an_unusable_endpoint_in_the_environment_turns_traces_off(
    name: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert traces_endpoint("", {name: value}) == ""
    assert f"no traces: {name} must " in caplog.text
    assert "secret" not in caplog.text


def test_a_missing_package_is_reported_without_the_query_of_the_endpoint() -> None:
    url = traces_endpoint("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/here?key=secret"})
    assert url == "http://c/here?key=secret"
    assert "tracing to http://c/here needs" in str(TracingUnavailable(url, "opentelemetry"))


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
