# SPDX-License-Identifier: Apache-2.0
"""Whole traces: a gateway and two engines as processes export the spans of a request to one collector."""

from __future__ import annotations

import itertools
import json
import os
import re
import runpy
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from demo_model import STORY, trained_answer
from engine_process import EngineProcess
from mizzen.common.options import flag
from ports import free_ports
from trace_collector import Collector, SpanList, attributes

pytestmark = pytest.mark.xdist_group("trace-processes")

ROOT = Path(__file__).parents[3]
WATERFALL = runpy.run_path(str(ROOT / "scripts/trace_waterfall.py"))
PAGE, PARENT = ROOT / "docs/tracing.md", "00f067aa0ba902b7"
CLOCK_SECONDS = 0.005
"""Tolerance of comparisons of times of different processes, which convert them to Unix time separately."""


@dataclass(frozen=True)
class Processes:
    """A running gateway, its engines by name, and the collector of all of their spans."""

    url: str
    engines: dict[str, EngineProcess]
    collector: Collector

    def stream(self, trace: str, on_chunk: Callable[[httpx.Response], None], **body: Any) -> str:
        """Stream a chat within a trace of the client; return the text of all choices together."""
        body = {"model": "demo", "messages": [{"role": "user", "content": STORY}], "stream": True, **body}
        headers, text = {"traceparent": f"00-{trace}-{PARENT}-01"}, ""
        with httpx.stream("POST", self.url, json=body, headers=headers, timeout=180) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "choices" in event, event
                    text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                    on_chunk(answer)
        return text

    def wait_for_trace(self, trace: str, engine_requests: int) -> SpanList:
        """Return a trace once it has the spans of the gateway and of `engine_requests` engine requests."""

        def arrived(found: SpanList) -> bool:
            counts = {len(found.named(name)) for name in ("engine.request", "prefill", "decode")}
            return found.root is not None and counts == {engine_requests}

        deadline = time.monotonic() + 60
        while not arrived(found := self.collector.trace(trace)):
            assert time.monotonic() < deadline, [span.name for span in found.spans]
            time.sleep(0.05)
        return found


def is_connected(admin_port: int, engines: int) -> bool:
    """Return whether `engines` engines serve according to the gateway's metrics."""
    try:
        metrics = httpx.get(f"http://127.0.0.1:{admin_port}/metrics").text
    except httpx.TransportError:
        return False
    return f'mizzen_gateway_engines{{state="serving"}} {engines}.0' in metrics


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder, collector, engines = tmp_path_factory.mktemp("trace"), Collector(), {}
    port = free_ports(count=2)
    with pytest.MonkeyPatch.context() as patch, (folder / "gateway-log").open("w") as log:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        for number in range(2):
            (folder / f"engine-{number}").mkdir()
            endpoint = f"tcp://127.0.0.1:{free_ports()}"
            engines[endpoint] = EngineProcess(
                folder / f"engine-{number}",
                tensor=1,
                served_name="demo",
                engine_id=f"engine-{number}",
                wire_bind=endpoint,
                otlp_endpoint=collector.url,
            )
        options = {
            "served_name": "demo",
            "port": port,
            "admin_port": port + 1,
            "access_log": "off",
            "resume_wait_seconds": 60,
            "engine_timeout_seconds": 2,
            "otlp_endpoint": collector.url,
        }
        words = [word for name, value in options.items() for word in (flag(name), str(value))]
        words += [word for endpoint in engines for word in ("--engine", endpoint)]
        gateway = subprocess.Popen([sys.executable, "-m", "mizzen.cli", "gateway", *words], stderr=log)
    try:
        for engine in engines.values():
            engine.until(lambda engine=engine: engine.get("/readyz").get("wire"))
        engine.until(lambda: is_connected(port + 1, len(engines)))
        yield Processes(f"http://127.0.0.1:{port}/v1/chat/completions", engines, collector)
    finally:
        gateway.kill()
        gateway.wait()
        for engine in engines.values():
            engine.close()
        collector.close()


def waterfall(trace: SpanList) -> str:
    return WATERFALL["render_waterfall"](WATERFALL["read_spans"]([trace.to_json()]))


def span_tree(waterfall: str) -> list[str]:
    """Return the names of the spans of a waterfall, with their indentation."""
    return re.findall(r"^( *(?:POST /)?[a-z_/0-9.]+)", waterfall, re.MULTILINE)


def check_engine_spans(processes: Processes, trace: SpanList, attempt: Any) -> dict[str, Any]:
    """Check the spans of the engine below an attempt; return the attributes of its span `engine.request`."""
    (request,) = trace.children(attempt)["engine.request"]
    engine = processes.engines[attributes(attempt)["engine.name"]]
    resource = processes.collector.resources[request.span_id]
    assert (resource["service.name"], resource["service.instance.id"]) == (
        "mizzen-engine",
        engine.log.parent.name,
    )
    steps = trace.children(request)
    assert sorted(steps) == ["decode", "prefill", "queue"]
    (queue,), (prefill,), (decode,) = steps["queue"], steps["prefill"], steps["decode"]
    assert queue.start_time_unix_nano == request.start_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano < prefill.end_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano < decode.end_time_unix_nano
    return attributes(request)


def test_streamed_choices_are_one_trace_from_the_client_to_the_engines_steps(processes: Processes) -> None:
    trace_id = secrets.token_hex(16)
    processes.stream(trace_id, lambda answer: None, n=2, max_tokens=48, temperature=0)
    trace = processes.wait_for_trace(trace_id, engine_requests=2)
    trace.check_nesting(CLOCK_SECONDS)
    assert trace.root.parent_span_id.hex() == PARENT
    assert processes.collector.resources[trace.root.span_id]["service.name"] == "mizzen-gateway"
    steps = trace.children(trace.root)
    assert {name: len(spans) for name, spans in steps.items()} == {
        "queue": 2,
        "tokenize": 1,
        "route": 2,
        "engine": 2,
    }
    for attempt in steps["engine"]:
        assert attempt.kind == attempt.SPAN_KIND_CLIENT
        values = check_engine_spans(processes, trace, attempt)
        assert values["gen_ai.usage.output_tokens"] == 48
    if file := os.environ.get("TRACE"):
        Path(file).write_text(trace.to_json() + "\n")
    (documented,) = re.findall(
        r"^```text\ntrace \w+\n\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert span_tree(documented) == span_tree(waterfall(trace))


def test_answer_that_another_engine_resumes_has_both_attempts_in_its_trace(processes: Processes) -> None:
    killed: list[str] = []
    chunks = itertools.count(1)

    def kill_engine(answer: httpx.Response) -> None:
        """Kill the engine that answers once the client has got some of the answer."""
        if next(chunks) == 40:
            route = dict(part.split("=", 1) for part in answer.headers["x-mizzen-route"].split("; "))
            killed.append(route["engine"])
            processes.engines[killed[0]].close()

    trace_id = secrets.token_hex(16)
    text = processes.stream(trace_id, kill_engine, temperature=0)
    assert text == trained_answer(STORY)
    trace = processes.wait_for_trace(trace_id, engine_requests=1)
    trace.check_nesting(CLOCK_SECONDS)
    lost, resumed = sorted(trace.named("engine"), key=lambda span: span.start_time_unix_nano)
    assert attributes(lost)["engine.name"] == killed[0] != attributes(resumed)["engine.name"]
    assert (lost.status.code, lost.status.message, resumed.status.code) == (2, "connection", 0)
    assert [event.name for event in (*lost.events, *resumed.events)] == ["first token"] * 2
    assert not trace.children(lost)  # a killed process exports nothing
    assert lost.end_time_unix_nano <= resumed.start_time_unix_nano
    values, root = check_engine_spans(processes, trace, resumed), attributes(trace.root)
    assert root["mizzen.attempts"] == 2
    assert values["mizzen.usage.resumed_tokens"] >= 20
    generated = values["mizzen.usage.resumed_tokens"] + values["gen_ai.usage.output_tokens"]
    assert generated == root["gen_ai.usage.output_tokens"]
    assert f"engine {killed[0]} (connection) " in waterfall(trace)
