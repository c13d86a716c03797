# SPDX-License-Identifier: Apache-2.0
"""The life of a service on a real API server, with operator, gateway and engine as real processes.

The tests run in the order of this file on one service: it is created, answers, is scaled, loses a pod, gets a
new spec, loses an engine, and is deleted.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml
from local_node_kit import pod_url
from prometheus_client.parser import text_string_to_metric_families

from demo_model import QUESTION, STORY, trained_answer
from mizzen.core.kv.block_hashes import BLOCK_TOKENS

ROOT = Path(__file__).parents[2]
NAME = "demo"
PATIENCE_SECONDS = 240
"""Limit in seconds of each wait and of a drain; long, because a busy machine may be slow."""

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


def service(cluster: Any) -> dict[str, Any]:
    return json.loads(cluster.kubectl("get", "infsvc", NAME, "-o", "json"))


def condition(cluster: Any, kind: str) -> dict[str, Any]:
    conditions = service(cluster).get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), {})


def engine_pods(cluster: Any) -> list[dict[str, Any]]:
    selector = f"mizzen.dev/service={NAME},mizzen.dev/component=engine"
    return json.loads(cluster.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]


def wait_until(check: Any, seconds: float, expectation: str) -> float:
    """Wait until `check()` returns something true; return how many seconds that took."""
    began = time.monotonic()
    while not check():
        assert time.monotonic() - began < seconds, f"after {seconds} s still not: {expectation}"
        time.sleep(0.1)
    return time.monotonic() - began


def settled(cluster: Any, groups: int) -> bool:
    """Return whether the service is Ready at its newest generation with exactly `groups` groups."""
    now = service(cluster)
    status = now.get("status", {})
    ready = [c for c in status.get("conditions", []) if c["type"] == "Ready"]
    return bool(
        ready
        and ready[0]["status"] == "True"
        and status["observedGeneration"] == now["metadata"]["generation"]
        and status["availableReplicas"] == groups
        and len(engine_pods(cluster)) == groups
    )


def client(cluster: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=cluster.url(NAME), api_key="none", max_retries=0, timeout=60)


def ask(cluster: Any, question: str = QUESTION) -> str | None:
    answer = client(cluster).chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": question}], temperature=0
    )
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content


@contextmanager
def streams(cluster: Any, concurrency: int = 3) -> Iterator[dict[str, Any]]:
    """Send streaming requests during the block.

    After the block, the yielded dictionary contains the number of streams by outcome.
    """
    counts: dict[str, Any] = {}
    command = [sys.executable, str(ROOT / "benchmarks/stream_load.py"), cluster.url(NAME), "--json"]
    options = ["--concurrency", str(concurrency), "--seconds", "300", "--prompt", STORY]
    load = subprocess.Popen(
        [*command, *options, "--expect", trained_answer(STORY), "--timeout", str(PATIENCE_SECONDS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        time.sleep(2)
        yield counts
        time.sleep(2)
    finally:
        load.send_signal(signal.SIGTERM)
        output = load.communicate(timeout=PATIENCE_SECONDS)[0]
    counts.update(json.loads(output.splitlines()[-1]))
    if counts["streams"] != counts["good"]:
        print_logs(cluster)


def all_good(counts: dict[str, Any]) -> bool:
    print(json.dumps(counts))
    return counts["streams"] == counts["good"] > 0


def print_logs(cluster: Any) -> None:
    """Print the end of the log of every pod of the service, also of deleted ones."""
    for log in sorted((cluster.dir / "logs/pods").glob(f"*_{NAME}-*/*/*.log")):
        print(f"── {log.parent.parent.name}", *log.read_text().splitlines()[-12:], sep="\n")


@pytest.fixture(scope="module")
def demo(cluster: Any) -> Iterator[Any]:
    """Apply the example with a longer drain; the service is deleted after the tests of this file.

    A busy machine may need minutes for answers that otherwise take seconds, and no answer may be cut.
    """
    manifest = yaml.safe_load((ROOT / "examples/inferenceservice.yaml").read_text())
    manifest["spec"]["lifecycle"]["drainTimeoutSeconds"] = PATIENCE_SECONDS
    cluster.apply(manifest)
    yield cluster
    cluster.kubectl("delete", "infsvc", NAME, "--ignore-not-found", "--wait=true", "--timeout=60s")


def test_an_applied_service_becomes_ready(demo: Any) -> None:
    seconds = wait_until(lambda: settled(demo, 1), PATIENCE_SECONDS, "Ready with one group")
    print(f"apply to Ready: {seconds:.1f} s")
    status = service(demo)["status"]
    assert {c["type"] for c in status["conditions"]} >= {
        "Ready",
        "Available",
        "Progressing",
        "Scheduled",
        "GatewayReady",
        "Failed",
    }
    assert status["url"].endswith("/v1")
    assert status["selector"]


def test_the_openai_client_gets_the_trained_answer(demo: Any) -> None:
    assert ask(demo) == trained_answer(QUESTION)
    stream = client(demo).chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == trained_answer(QUESTION)
    assert chunks[-1].usage is not None
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_scaling_up_loses_no_stream(demo: Any) -> None:
    with streams(demo) as counts:
        demo.kubectl("scale", "infsvc", NAME, "--replicas=3")
        wait_until(lambda: settled(demo, 3), PATIENCE_SECONDS, "three groups")
    assert all_good(counts)


def test_a_deleted_pod_drains_and_is_replaced(demo: Any) -> None:
    victim = engine_pods(demo)[0]["metadata"]["name"]
    with streams(demo) as counts:
        demo.kubectl("delete", "pod", victim, "--wait=false")
        wait_until(
            lambda: victim not in {p["metadata"]["name"] for p in engine_pods(demo)},
            PATIENCE_SECONDS,
            "pod gone",
        )
        wait_until(lambda: settled(demo, 3), PATIENCE_SECONDS, "three groups again")
    assert all_good(counts)


def test_scaling_down_loses_no_stream(demo: Any) -> None:
    with streams(demo) as counts:
        demo.kubectl("scale", "infsvc", NAME, "--replicas=1")
        wait_until(lambda: settled(demo, 1), PATIENCE_SECONDS, "one group")
    assert all_good(counts)


def test_a_spec_change_replaces_the_group_without_a_gap(demo: Any) -> None:
    before = {p["metadata"]["name"] for p in engine_pods(demo)}
    patch = {"spec": {"engine": {"maxRunningRequests": 48}}}
    with streams(demo) as counts:
        demo.kubectl("patch", "infsvc", NAME, "--type=merge", "-p", json.dumps(patch))
        wait_until(
            lambda: settled(demo, 1) and not before & {p["metadata"]["name"] for p in engine_pods(demo)},
            PATIENCE_SECONDS,
            "rollout",
        )
    assert all_good(counts)


def metric(pod: dict[str, Any], name: str) -> float:
    """Return the sum of all samples of a metric that an engine's pod exports."""
    with urllib.request.urlopen(f"{pod_url(pod)}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == name)


def test_a_rollout_fills_the_new_groups_cache_before_its_first_request(demo: Any) -> None:
    """While no client sends requests, the gateway sends the hottest prefixes to the new engine."""
    before = {p["metadata"]["name"] for p in engine_pods(demo)}
    hot = "Tell me of a ship. " * 30
    completions = client(demo).completions
    for _ in range(3):
        completions.create(model=NAME, prompt=hot, max_tokens=1, temperature=0)
    patch = {"spec": {"engine": {"maxRunningRequests": 40}}}
    demo.kubectl("patch", "infsvc", NAME, "--type=merge", "-p", json.dumps(patch))
    wait_until(
        lambda: settled(demo, 1) and not before & {p["metadata"]["name"] for p in engine_pods(demo)},
        PATIENCE_SECONDS,
        "rollout",
    )
    [pod] = engine_pods(demo)
    assert metric(pod, "mizzen_engine_requests_total") >= 1, "the gateway sent hot prefixes"
    assert metric(pod, "mizzen_engine_prompt_tokens_total") >= BLOCK_TOKENS
    assert metric(pod, "mizzen_engine_cached_prompt_tokens_total") == 0, "no client request yet"
    usage = completions.create(model=NAME, prompt=hot, max_tokens=1, temperature=0).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= usage.prompt_tokens - 2 * BLOCK_TOKENS > BLOCK_TOKENS
    wait_until(
        lambda: metric(pod, "mizzen_engine_cached_prompt_tokens_total") == cached,
        20,
        "the engine reports the cached tokens",
    )


def test_deleting_the_only_pod_holds_requests_until_the_next_is_up(demo: Any) -> None:
    victim = engine_pods(demo)[0]["metadata"]["name"]
    with streams(demo) as counts:
        demo.kubectl("delete", "pod", victim, "--wait=false")
        wait_until(
            lambda: victim not in {p["metadata"]["name"] for p in engine_pods(demo)},
            PATIENCE_SECONDS,
            "pod gone",
        )
        wait_until(lambda: settled(demo, 1), PATIENCE_SECONDS, "one group again")
    assert all_good(counts)


def processes_of(cluster: Any, pod: dict[str, Any]) -> list[psutil.Process]:
    """Return the processes of a pod on this machine."""
    folder = f"{cluster.dir}/pods/{pod['metadata']['uid']}/"
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("MIZZEN_LOCAL_MARK", "").startswith(folder):
                processes.append(process)
    return processes


def rank_process(cluster: Any, pod: dict[str, Any]) -> psutil.Process:
    """Return the process that executes the model in a pod."""
    ranks = [p for p in processes_of(cluster, pod) if "mizzen.server.ranks.leader" in p.cmdline()]
    assert len(ranks) == 1
    return ranks[0]


def test_a_killed_engine_ends_its_streams_with_an_error_and_is_replaced(demo: Any) -> None:
    rank = rank_process(demo, engine_pods(demo)[0])
    stream = client(demo).chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": STORY}], temperature=0, stream=True
    )
    text = []
    with pytest.raises(openai.APIError):
        for chunk in stream:
            text.append(chunk.choices[0].delta.content or "")
            if len(text) == 3:
                rank.kill()
    assert trained_answer(STORY).startswith("".join(text))
    began = time.monotonic()
    assert ask(demo) == trained_answer(QUESTION)
    print(f"kill -9 to next answer: {time.monotonic() - began:.1f} s")
    wait_until(lambda: settled(demo, 1), PATIENCE_SECONDS, "one group again")


def test_no_object_has_kopf_annotations_or_finalizers(demo: Any) -> None:
    objects = json.loads(
        demo.kubectl(
            "get", "infsvc,pods,deployments,services,secrets,serviceaccounts,rolebindings", "-o", "json"
        )
    )["items"]
    assert len(objects) > 5
    for obj in objects:
        metadata = obj["metadata"]
        assert not any("kopf" in name for name in metadata.get("annotations", {})), metadata["name"]
        assert not metadata.get("finalizers"), metadata["name"]


def test_deleting_the_service_leaves_no_object_and_no_process(demo: Any) -> None:
    pods = json.loads(demo.kubectl("get", "pods", "-l", f"mizzen.dev/service={NAME}", "-o", "json"))["items"]
    processes = [process for pod in pods for process in processes_of(demo, pod)]
    assert len(pods) >= 2
    assert len(processes) >= 3
    demo.kubectl("delete", "infsvc", NAME, "--wait=true", "--timeout=60s")
    kinds = "pods,deployments,replicasets,services,secrets,serviceaccounts,rolebindings,configmaps"
    wait_until(
        lambda: (
            not json.loads(demo.kubectl("get", kinds, "-l", f"mizzen.dev/service={NAME}", "-o", "json"))[
                "items"
            ]
        ),
        90,
        "no object of the service left",
    )
    wait_until(lambda: not any(p.is_running() for p in processes), 30, "no process of the service left")
