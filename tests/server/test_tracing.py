# SPDX-License-Identifier: Apache-2.0
"""The engine's own spans: a process of a simulated engine, a gateway's wire, and a collector."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from mizzen.common.otlp import TracingUnavailable
from mizzen.common.request_timeline import MAX_CHUNKS, MAX_PREEMPTIONS, start_timeline
from mizzen.core.request import Finished, FinishReason, Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.server.config import EngineConfig
from mizzen.server.tracing.live_traces import LiveTraces
from mizzen.server.tracing.request_trace import RequestTrace, encode_trace, read_trace
from mizzen.server.tracing.trace_export import check_tracing, start_trace_export
from mizzen.wire.messages import Abort
from trace_collector import Collector, attributes

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def traceparent(span: int, flags: str = "01") -> str:
    return f"00-{TRACE}-{span:016x}-{flags}"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    new_collector = Collector()
    yield new_collector
    new_collector.close()


def test_only_the_option_makes_an_engine_require_opentelemetry(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "mizzen.server.tracing.engine_spans", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    config = EngineConfig(model="tiny-model")
    check_tracing(config)
    assert start_trace_export(config) is None
    assert "pip install 'mizzen[tracing]'" in caplog.text
    with pytest.raises(TracingUnavailable, match=r"mizzen\[tracing\]"):
        check_tracing(replace(config, otlp_endpoint="http://127.0.0.1:4318"))


def test_request_becomes_a_tree_of_spans(start_engine: Callable[..., Any], collector: Collector) -> None:
    engine = start_engine(
        otlp_endpoint=collector.url, engine_id="chat-0-3", revision="abc", prefill_chunk_tokens=64
    )
    gateway, prompt = engine.gateway(), list(range(3, 203))
    gateway.generate(1, prompt, max_tokens=8, ignore_eos=True, traceparent=traceparent(7))
    gateway.until(lambda: 1 in gateway.ends)
    gateway.generate(2, prompt, max_tokens=1, ignore_eos=True, traceparent=traceparent(8))
    engine.until(lambda: len(collector.named("engine.request")) == 2)
    collector.check_nesting()
    first, second = sorted(collector.named("engine.request"), key=lambda span: span.start_time_unix_nano)
    assert first.trace_id.hex() == TRACE
    assert int(first.parent_span_id.hex(), 16) == 7
    values = attributes(first)
    assert values["gen_ai.request.model"] == "tiny-model"
    assert values["gen_ai.usage.input_tokens"] == 200
    assert values["gen_ai.usage.output_tokens"] == 8
    assert values["gen_ai.response.finish_reasons"] == ["length"]
    assert values["gen_ai.server.time_to_first_token"] > 0.03  # four chunks, 10 ms each
    resource = collector.resources[first.span_id]
    assert resource["service.name"] == "mizzen-engine"
    assert resource["service.instance.id"] == "chat-0-3"
    assert resource["mizzen.revision"] == "abc"
    parts = collector.children(first)
    assert sorted(parts) == ["decode", "prefill", "queue"]
    prefill, decode = parts["prefill"][0], parts["decode"][0]
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert attributes(prefill)["mizzen.prefill.chunks"] == 4
    assert attributes(prefill)["mizzen.prefill.tokens"] == 200
    assert [attributes(event)["mizzen.chunk.start"] for event in prefill.events] == [0, 64, 128, 192]
    assert attributes(decode)["mizzen.decode.tokens"] == 7
    assert attributes(decode)["mizzen.decode.mean_batch_size"] == 1.0
    assert 0.005 < attributes(decode)["gen_ai.server.time_per_output_token"] < 1
    again = collector.children(second)
    assert sorted(again) == ["prefill", "queue"]  # its only token ends the prefill
    cached = attributes(again["prefill"][0])["mizzen.usage.cached_tokens"]
    assert cached == attributes(second)["mizzen.usage.cached_tokens"] == 192


def test_only_requests_of_sampled_traces_are_traced(
    start_engine: Callable[..., Any], collector: Collector
) -> None:
    engine = start_engine(otlp_endpoint=collector.url)
    gateway = engine.gateway()
    contexts = ["", "nonsense", traceparent(1, "00"), traceparent(0), "x" * 4000, traceparent(9)]
    for rid, context in enumerate(contexts):
        gateway.generate(rid, max_tokens=2, ignore_eos=True, traceparent=context)
    gateway.until(lambda: len(gateway.ends) == len(contexts))
    engine.until(lambda: bool(collector.named("engine.request")))
    time.sleep(0.2)
    assert [int(span.parent_span_id.hex(), 16) for span in collector.named("engine.request")] == [9]


def test_preemptions_are_spans_within_the_phase_they_interrupt(
    start_engine: Callable[..., Any], collector: Collector
) -> None:
    engine = start_engine(otlp_endpoint=collector.url, kv_cache_tokens=256, page_size=16, step_milliseconds=2)
    gateway = engine.gateway()
    for rid in range(4):
        prompt = [10 + rid] * 20
        gateway.generate(rid, prompt, max_tokens=100, ignore_eos=True, traceparent=traceparent(rid + 1))
    gateway.until(lambda: len(gateway.ends) == 4)
    assert all(len(tokens) == 100 for tokens in gateway.tokens.values())
    engine.until(lambda: len(collector.named("engine.request")) == 4)
    collector.check_nesting()
    preemptions = collector.named("preemption")
    counted = sum(attributes(span)["mizzen.preemptions"] for span in collector.named("engine.request"))
    assert len(preemptions) == counted > 0
    phases = {span.span_id: span.name for span in collector.spans}
    for span in preemptions:
        assert phases[span.parent_span_id] in ("decode", "prefill")
        values = attributes(span)
        assert values["mizzen.preemption.reason"] == "memory"
        assert values["mizzen.preemption.wait_seconds"] > 0
        assert values["mizzen.prefill.chunks"] == 1
        assert values["mizzen.preemption.recomputed_tokens"] + values["mizzen.usage.cached_tokens"] >= 20
        assert [event.name for event in span.events] == ["resumed"]


def test_preemption_by_a_request_of_higher_priority_says_so(
    start_engine: Callable[..., Any], collector: Collector
) -> None:
    engine = start_engine(otlp_endpoint=collector.url, policy="priority", max_running_requests=1)
    gateway = engine.gateway()
    gateway.generate(1, max_tokens=50, ignore_eos=True, traceparent=traceparent(1))
    gateway.until(lambda: len(gateway.tokens[1]) > 3)
    gateway.generate(2, max_tokens=5, ignore_eos=True, traceparent=traceparent(2), priority=1)
    gateway.until(lambda: len(gateway.ends) == 2)
    engine.until(lambda: len(collector.named("engine.request")) == 2)
    collector.check_nesting()
    urgent, preempted = collector.named("engine.request")
    assert [attributes(span)["mizzen.preemptions"] for span in (urgent, preempted)] == [0, 1]
    (decode,) = collector.children(preempted)["decode"]
    (preemption,) = collector.children(decode)["preemption"]
    assert attributes(preemption)["mizzen.preemption.reason"] == "priority"
    (prefill,) = collector.children(urgent)["prefill"]
    assert preemption.start_time_unix_nano <= prefill.start_time_unix_nano
    (resumed,) = preemption.events
    assert prefill.end_time_unix_nano <= resumed.time_unix_nano <= preemption.end_time_unix_nano


def test_aborted_and_waiting_requests_are_traced(
    start_engine: Callable[..., Any], collector: Collector
) -> None:
    engine = start_engine(otlp_endpoint=collector.url, max_running_requests=1)
    gateway = engine.gateway()
    gateway.generate(1, max_tokens=1000, ignore_eos=True, traceparent=traceparent(1))
    gateway.until(lambda: len(gateway.tokens[1]) > 3)
    gateway.generate(2, max_tokens=1000, traceparent=traceparent(2), queue_seconds=0.1)
    engine.until(lambda: bool(collector.named("engine.request")))
    (waited,) = collector.named("engine.request")
    assert sorted(collector.children(waited)) == ["queue"]
    assert attributes(waited)["gen_ai.response.finish_reasons"] == ["abort"]
    gateway.send(Abort(1))
    engine.until(lambda: len(collector.named("engine.request")) == 2)
    aborted = collector.named("engine.request")[1]
    assert sorted(collector.children(aborted)) == ["decode", "prefill", "queue"]
    assert attributes(aborted)["gen_ai.usage.output_tokens"] > 3
    assert aborted.status.code == 0


def test_failed_step_ends_the_spans_of_live_requests(
    start_engine: Callable[..., Any], collector: Collector
) -> None:
    engine = start_engine(otlp_endpoint=collector.url, fail_after_tokens=5)
    gateway = engine.gateway()
    gateway.generate(1, max_tokens=100, ignore_eos=True, traceparent=traceparent(1))
    assert engine.wait() == 1
    (request,) = collector.named("engine.request")
    assert (request.status.code, request.status.message) == (2, "engine_error")
    assert sorted(collector.children(request)) == ["decode", "prefill", "queue"]


def test_headers_come_from_a_file_that_may_change(
    start_engine: Callable[..., Any], collector: Collector, tmp_path: Path
) -> None:
    file = tmp_path / "otlp-headers"
    engine = start_engine(otlp_endpoint=collector.url, otlp_headers_file=file)
    gateway = engine.gateway()

    def send(rid: int) -> dict[str, str]:
        received = len(collector.headers)
        gateway.generate(rid, max_tokens=1, traceparent=traceparent(rid))
        engine.until(lambda: len(collector.headers) > received)
        return collector.headers[-1]

    assert "authorization" not in send(1)  # the Secret may be created later
    file.write_text("Authorization=Bearer%20first-secret,x-tenant=a")
    assert (send(2)["authorization"], send(3)["x-tenant"]) == ("Bearer first-secret", "a")
    file.write_text("second-secret")
    assert send(4)["authorization"] == "Bearer first-secret"
    file.write_text("authorization=third-secret")
    headers = send(5)
    assert headers["authorization"] == "third-secret"
    assert "x-tenant" not in headers
    assert "-secret" not in str(engine.log)
    problems = [line["reason"] for line in engine.log if line.get("option") == "--otlp-headers-file"]
    assert problems == ["No such file or directory", "entry 1 is not NAME=VALUE"]
    assert "-secret" not in str(engine.rank.cmdline())


def test_a_collector_that_hangs_or_refuses_slows_nothing_and_drops_are_counted(
    start_engine: Callable[..., Any], collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    collector.hangs.set()
    engine = start_engine(otlp_endpoint=collector.url, step_milliseconds=1)
    gateway = engine.gateway()
    began = time.monotonic()
    for rid in range(50):
        gateway.generate(rid, max_tokens=4, ignore_eos=True, traceparent=traceparent(rid + 1))
    gateway.until(lambda: len(gateway.ends) == 50)
    assert time.monotonic() - began < 5
    dropped = ("mizzen_engine_dropped_spans_total",)
    engine.until(lambda: engine.metrics()[dropped] >= 4 * 50 - 12)
    collector.status = 401
    collector.hangs.clear()
    engine.until(lambda: engine.metrics()[dropped] == 4 * 50)
    assert not collector.spans


def test_engine_exits_in_time_although_the_collector_hangs(
    start_engine: Callable[..., Any], collector: Collector
) -> None:
    collector.hangs.set()
    engine = start_engine(otlp_endpoint=collector.url)
    gateway = engine.gateway()
    gateway.generate(1, max_tokens=2, traceparent=traceparent(1))
    gateway.until(lambda: 1 in gateway.ends)
    began = time.monotonic()
    engine.process.terminate()
    assert engine.wait() == 0
    assert time.monotonic() - began < 8


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector", "http://", "http://a b"])
def test_endpoint_must_be_an_http_url(endpoint: str, start_engine: Callable[..., Any]) -> None:
    engine = start_engine(otlp_endpoint=endpoint)
    assert engine.wait() == 2


def full_trace() -> RequestTrace:
    timeline = start_timeline(traceparent(2**64 - 1), 1e6)
    assert timeline is not None
    for number in range(2 * MAX_CHUNKS):
        timeline.launch_chunk(1e6 + number / 3, 10**6 * number, 10**6)
    timeline.receive_token(1e6, 10**9, 0)
    for number in range(2 * MAX_PREEMPTIONS):
        timeline.preempt(1e6 + number / 3, "priority", 10**6)
        timeline.launch_chunk(1e6 + number / 3, 10**6, 10**6)
        timeline.receive_token(1e6 + number / 3, 10**9, number + 1)
    return RequestTrace(
        timeline=timeline,
        ended=1e6,
        finish_reason="length",
        error="invalid_request",
        prompt_tokens=10**6,
        cached_tokens=10**6,
        output_tokens=10**6,
        mean_batch=1 / 3,
    )


def test_longest_record_fits_into_one_write_to_the_pipe(tmp_path: Path) -> None:
    trace = full_trace()
    assert trace.timeline.chunk_count == 2 * MAX_CHUNKS
    assert len(trace.timeline.preemptions) == MAX_PREEMPTIONS
    frame = encode_trace(trace)
    assert len(frame) <= 4096
    (tmp_path / "records").write_bytes(frame + frame + b"\x05\x00broken" + frame[:100])
    with (tmp_path / "records").open("rb") as stream:
        assert read_trace(stream) == read_trace(stream) == trace
        with pytest.raises(msgspec.MsgspecError):
            read_trace(stream)


def test_full_pipe_drops_records_and_never_blocks() -> None:
    read_end, write_end = os.pipe()
    dropped: list[int] = []
    traces = LiveTraces(write_end, dropped.append)
    prompt, timeline = np.array([1, 2], np.int32), start_timeline(traceparent(1), 1.0)
    for rid in range(2000):
        traces.add([Request(rid=rid, prompt=prompt, sampling=SamplingParams(), timeline=timeline)])
        end = Finished(rid=rid, reason=FinishReason.STOP, prompt_tokens=2, cached_tokens=0, output_tokens=5)
        traces.finish([end], 2.0)
    assert sum(dropped) > 1000
    traces.close()
    os.close(read_end)
