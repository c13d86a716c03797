# SPDX-License-Identifier: Apache-2.0
"""Metrics of the gateway: counts, bounded labels, and fast metrics that equal those of the client library."""

from __future__ import annotations

import math
import re
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mizzen.gateway.telemetry.fast_metrics import OTHER_LABEL, FastHistogram, FastHistogramFamily
from mizzen.gateway.telemetry.metrics import LABELS, MAX_MODELS, Metrics
from mizzen.gateway.telemetry.request_record import RequestRecord
from mizzen.gateway.text.tokenizer import Tokenizer

BODY = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the values of all samples in the text of a scrape, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Scrape:
    """The metrics of a gateway in the format that Prometheus scrapes."""

    def __init__(self, text: str) -> None:
        self._samples = samples(text)

    def __call__(self, name: str, **labels: str) -> float:
        return self._samples.get((f"mizzen_gateway_{name}", tuple(sorted(labels.items()))), 0.0)

    @property
    def labels(self) -> set[tuple[str, str]]:
        return {pair for _, labels in self._samples for pair in labels}


async def scrape(gateway: Any) -> Scrape:
    async with httpx.AsyncClient(timeout=60) as http:
        return Scrape((await http.get(f"{gateway.admin}/metrics")).text)


async def post(gateway: Any, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(f"{gateway.url}{path}", json={**BODY, **body})


async def test_tokens_up_to_a_stop_string_are_counted_with_or_without_usage(
    scripted: Any, live: Any, tokenizer: Tokenizer
) -> None:
    engine = scripted()
    engine.does.reply = tokenizer.encode("A mast holds the sails of a ship", add_special_tokens=False)
    engine.does.cached_tokens = 3
    gateway = await live(engine)
    assert '"finish_reason":"stop"' in (await post(gateway, stream=True, stop=["the sa"], max_tokens=50)).text
    scraped = await scrape(gateway)
    assert scraped("cached_prompt_tokens_total", model="demo") == 3
    assert scraped("aborts_total", cause="stop_string") == 1


async def test_requests_are_counted_by_model(scripted: Any, live: Any) -> None:
    engine = scripted()
    engine.does.cached_tokens = 16
    gateway = await live(engine, alias=("pet",))
    await post(gateway)
    await post(gateway, model="pet", stream=True)
    scraped = await scrape(gateway)
    prompt = len(engine.requests[0].prompt) // 4
    for model in ("demo", "pet"):
        assert scraped("requests_total", path="/v1/chat/completions", code="200", model=model) == 1
        assert scraped("output_tokens_total", model=model) == 3
        assert scraped("prompt_tokens_total", model=model) == prompt
        assert scraped("cached_prompt_tokens_total", model=model) == 16
        for histogram in ("request_seconds", "time_to_first_token_seconds", "queue_seconds"):
            assert scraped(f"{histogram}_count", model=model) == 1
            assert scraped(f"{histogram}_bucket", model=model, le="+Inf") == 1
        assert 1 <= scraped("inter_token_seconds_count", model=model) <= 2
    assert scraped("route_total", reason="only") == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("embeddings", {"input": [[5] * 30, [6] * 12]}),
        ("score", {"query": [5] * 20, "items": [[6], [7]], "label_token_ids": [7]}),
    ],
)
async def test_prompt_tokens_of_embeddings_and_scores_are_counted(
    scripted: Any, live: Any, path: str, body: dict[str, Any], capsysbinary: Any, until: Any
) -> None:
    engine = scripted()
    engine.does.cached_tokens = 4 if path == "embeddings" else 0
    gateway = await live(engine)
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{gateway.url}/v1/{path}", json={"model": "demo", **body})
    assert answer.status_code == 200, answer.text
    scraped = await scrape(gateway)
    assert scraped("prompt_tokens_total", model="demo") == 42
    assert scraped("cached_prompt_tokens_total", model="demo") == 2 * engine.does.cached_tokens
    assert scraped("queue_seconds_count", model="demo") == 2
    assert scraped("output_tokens_total", model="demo") == (2 if path == "score" else 0)
    log = b""

    def logged() -> bool:
        nonlocal log
        log += capsysbinary.readouterr().out
        return b'"prompt_tokens":42' in log

    await until(logged)


async def test_unknown_paths_and_models_become_no_label(scripted: Any, live: Any) -> None:
    gateway = await live(scripted())
    for number in range(20):
        await post(gateway, model=f"invented-{number}")
        await post(gateway, path=f"/v1/invented-{number}")
    async with httpx.AsyncClient(timeout=60) as http:
        await http.get(f"{gateway.url}/v1/models/invented")
    scraped = await scrape(gateway)
    assert not [value for _, value in scraped.labels if "invented" in value]
    assert scraped("requests_total", path="/v1/chat/completions", code="404", model=OTHER_LABEL) == 20
    assert scraped("requests_total", path=OTHER_LABEL, code="404", model=OTHER_LABEL) == 20


async def test_refusals_are_counted_by_error_code(live: Any) -> None:
    gateway = await live("tcp://127.0.0.1:9", wait=False, queue_timeout_seconds=0.0)
    assert (await post(gateway)).status_code == 503
    assert (await scrape(gateway))("refused_requests_total", cause="no_engine") == 1


async def test_retries_are_counted_by_cause(scripted: Any, live: Any) -> None:
    engine = scripted()
    engine.does.fault, engine.does.fault_after = "error", 0
    gateway = await live(engine, max_attempts=2)
    assert (await post(gateway)).status_code == 503
    assert (await scrape(gateway))("retries_total", cause="engine_error") == 2


async def test_added_seconds_exclude_the_engine_time(scripted: Any, live: Any) -> None:
    engine = scripted()
    engine.does.first_token_seconds = 1e-9
    gateway = await live(engine)
    assert (await post(gateway)).status_code == 200
    scraped = await scrape(gateway)
    assert scraped("added_seconds_count", model="demo") == 1
    assert 0 < scraped("added_seconds_sum", model="demo") < scraped("request_seconds_sum", model="demo")


def test_every_metric_label_is_bounded_and_documented() -> None:
    metrics = Metrics()
    metrics.for_model("demo")
    labels = set()
    for collector in metrics.registry._collector_to_names:
        labels |= set(getattr(collector, "_labelnames", ()))
    for family in metrics.registry.collect():
        labels |= set(getattr(family, "_labelnames", ()))
    assert labels == set(LABELS)


def test_number_of_model_labels_is_bounded() -> None:
    metrics = Metrics(lambda: [f"model-{number}" for number in range(10 * MAX_MODELS)])
    for number in range(10 * MAX_MODELS):
        metrics.for_model(f"model-{number}").output_tokens.inc(2)
    series = re.findall(r"^mizzen_gateway_output_tokens_total\{.*\} (.*)$", metrics.render().decode(), re.M)
    assert len(series) == MAX_MODELS + 1
    assert sum(map(float, series)) == 20 * MAX_MODELS


def test_request_without_a_model_only_counts_as_a_request() -> None:
    metrics = Metrics(lambda: ["demo"])
    record = RequestRecord(request_id="r", method="GET", path="/v1/models", status=200)
    record.ended = record.began + 1
    metrics.count_request(record, "/v1/models")
    scraped = Scrape(metrics.render().decode())
    assert scraped("requests_total", path="/v1/models", code="200", model=OTHER_LABEL) == 1
    assert scraped("request_seconds_count", model=OTHER_LABEL) == 0


@given(
    bounds=st.lists(st.floats(0.001, 100), min_size=1, max_size=8, unique=True).map(sorted).map(tuple),
    data=st.data(),
)
def test_fast_histogram_equals_the_client_library(bounds: tuple[float, ...], data: st.DataObject) -> None:
    """Values lie on bucket bounds, between them, and beyond all of them."""
    value = st.one_of(st.floats(0, 200), st.sampled_from(bounds))
    values = data.draw(st.lists(value, max_size=50))
    fast, reference = CollectorRegistry(), CollectorRegistry()
    spread = FastHistogram(bounds)
    fast.register(FastHistogramFamily("x", "text", "model", lambda: [("m", spread)]))  # type: ignore[arg-type]
    histogram = Histogram("x", "text", ["model"], registry=reference, buckets=bounds)
    histogram.labels("m")
    for observed in values:
        spread.observe(observed)
        histogram.labels("m").observe(observed)
    actual, expected = (samples(generate_latest(registry).decode()) for registry in (fast, reference))
    for key, number in actual.items():
        assert math.isclose(number, expected[key], abs_tol=1e-9), key
    assert {key for key in expected if not key[0].endswith("_created")} == set(actual)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models"])
async def test_path_labels_are_paths_of_the_api(path: str, scripted: Any, live: Any) -> None:
    gateway = await live(scripted())
    async with httpx.AsyncClient(timeout=60) as http:
        await http.request("GET" if path == "/v1/models" else "POST", f"{gateway.url}{path}", content=b"{}")
    text = (await scrape(gateway)).labels
    assert ("path", path) in text


def test_rare_error_counters_exist_before_the_first_error() -> None:
    all_samples = samples(Metrics().render().decode())
    assert all_samples[("mizzen_gateway_stream_errors_total", (("cause", "no_engine"),))] == 0
    assert all_samples[("mizzen_gateway_resume_failures_total", (("cause", "too_many"),))] == 0
