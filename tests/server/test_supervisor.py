# SPDX-License-Identifier: Apache-2.0
"""Process tree of an engine pod: probes, metrics, drain, and all kinds of exit."""

from __future__ import annotations

import re
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from live_processes import is_alive
from mizzen.core.request import FinishReason
from mizzen.server.ranks.device_loss import is_device_lost
from mizzen.wire.messages import PROTOCOL, Hello, RefusalCode, Refused, Stats

Start = Callable[..., Any]


def test_probes_and_metrics_are_correct_from_startup_to_exit(start_engine: Start) -> None:
    engine = start_engine(start_seconds=1.0, served_name="tiny", check_integrity="true")
    engine.until(lambda: engine.get("/healthz")[0] == 200)
    code, body = engine.get("/readyz")
    assert (code, body["state"]) == (503, "starting") and body["phase"] in (
        "spawn",
        "import",
        "config",
        "weights",
    )
    assert engine.metrics()["mizzen_engine_state", "starting"] == 1
    gateway = engine.gateway()
    gateway.generate(1, prompt=[3] * 40, max_tokens=5)
    gateway.generate(2, temperature=-1.0)
    gateway.socket.send(b"garbage")
    gateway.until(lambda: 1 in gateway.ends and len(refusals(gateway)) == 2)
    gateway.generate(3, prompt=[3] * 40, max_tokens=3)
    gateway.until(lambda: 3 in gateway.ends)
    assert gateway.ends[3].cached_tokens == 32  # two full pages of 16 tokens
    engine.until(lambda: engine.metrics()["mizzen_engine_output_tokens_total",] == 8)
    metrics = engine.metrics()
    for name, value in {
        ("mizzen_engine_requests_total",): 2,
        ("mizzen_engine_prompt_tokens_total",): 80,
        ("mizzen_engine_cached_prompt_tokens_total",): 32,
        ("mizzen_engine_finished_requests_total", "length"): 2,
        ("mizzen_engine_refused_total", "invalid"): 2,
        ("mizzen_engine_malformed_frames_total",): 1,
        ("mizzen_engine_gateways",): 1,
        ("mizzen_engine_running_requests",): 0,
        ("mizzen_engine_integrity_violations_total",): 0,
        ("mizzen_engine_kv_pages",): (1 << 18) / 16,
        ("mizzen_engine_time_to_first_token_seconds_count",): 2,
        ("mizzen_engine_step_seconds_count",): metrics["mizzen_engine_steps_total",],
        ("mizzen_engine_state", "serving"): 1,
        ("sglang:num_running_reqs",): 0,
        ("sglang:num_queue_reqs",): 0,
        ("sglang:generation_tokens_total",): 8,
        ("sglang:token_usage",): 0,
        ("sglang:max_total_num_tokens",): 1 << 18,
        ("sglang:num_used_tokens",): 0,
        ("sglang:num_aborted_requests_total",): 0,
        ("sglang:cache_hit_rate",): 32 / 80,
        ("sglang:inter_token_latency_seconds_count",): 6,
        ("sglang:e2e_request_latency_seconds_count",): 2,
        ("vllm:request_success_total", "length"): 2,
        ("mizzen_engine_oldest_wait_seconds",): 0,
    }.items():
        assert metrics[name] == value, name
    assert metrics["mizzen_engine_startup_seconds", "weights"] >= 1.0
    first, total = (f"sglang:{name}_seconds_sum" for name in ("time_to_first_token", "e2e_request_latency"))
    assert metrics[total,] >= metrics[first,] > 0
    assert 'model_name="tiny"' in engine.get("/metrics")[1]
    accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    request = urllib.request.Request(f"http://127.0.0.1:{engine.port}/metrics", headers=accept)
    with urllib.request.urlopen(request, timeout=10) as answer:  # the format that Prometheus requests
        assert "\nsglang:num_running_reqs{" in answer.read().decode()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait() == 0
    assert not engine.message.exists()


def refusals(gateway: Any) -> list[Refused]:
    return [message for message in gateway.others if isinstance(message, Refused)]


def test_a_gateway_with_another_protocol_is_counted_and_logged_once(start_engine: Any) -> None:
    engine = start_engine()
    gateway = engine.gateway()
    for _ in range(3):
        gateway.send(Hello(PROTOCOL + 1, "newer"))
    engine.until(lambda: engine.metrics()["mizzen_engine_refused_protocols_total",] == 3)
    (line,) = [
        entry for entry in engine.log if entry["event"] == "rejected a gateway that speaks another protocol"
    ]
    assert (line["level"], line["gateway"]) == ("warning", "newer")
    assert (line["protocol"], line["spoken"]) == (PROTOCOL + 1, PROTOCOL)


def test_sigterm_drains_running_streams(start_engine: Start) -> None:
    engine = start_engine(step_milliseconds=20)
    gateway = engine.gateway()
    gateway.generate(1, max_tokens=300)
    gateway.until(lambda: len(gateway.tokens[1]) > 5)
    engine.process.send_signal(signal.SIGTERM)
    gateway.until(lambda: any(isinstance(message, Stats) and message.draining for message in gateway.others))
    assert engine.get("/readyz")[0] == 503
    assert engine.get("/healthz") == (200, {"state": "draining"})
    gateway.generate(2)
    assert gateway.expect(Refused).code == RefusalCode.DRAINING
    gateway.until(lambda: 1 in gateway.ends)
    assert len(gateway.tokens[1]) == 300
    assert gateway.ends[1].reason == FinishReason.LENGTH
    assert engine.wait() == 0


def test_requests_that_outlast_the_drain_timeout_end_with_an_error(start_engine: Start) -> None:
    engine = start_engine(drain_timeout_seconds=0.5)
    gateway = engine.gateway()
    gateway.generate(1)
    gateway.until(lambda: len(gateway.tokens[1]) > 2)
    engine.process.send_signal(signal.SIGTERM)
    gateway.until(lambda: 1 in gateway.ends)
    assert gateway.ends[1].reason == FinishReason.ERROR
    assert "shut down" in gateway.ends[1].message
    assert engine.wait() == 0


def test_a_second_signal_exits_immediately(start_engine: Start) -> None:
    engine = start_engine()
    gateway = engine.gateway()
    gateway.generate(1)
    gateway.until(lambda: len(gateway.tokens[1]) > 2)
    engine.process.send_signal(signal.SIGTERM)
    engine.until(lambda: any(line["event"] == "draining" for line in engine.log))
    engine.process.send_signal(signal.SIGINT)
    assert engine.wait() == 128 + signal.SIGINT


def test_sigterm_during_startup_exits_immediately(start_engine: Start) -> None:
    engine = start_engine(start_seconds=600)
    engine.until(lambda: engine.get("/readyz")[1].get("phase") == "weights")
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait() == 0


def test_post_drain_keeps_the_process_running(start_engine: Start) -> None:
    engine = start_engine()
    gateway = engine.gateway()
    gateway.generate(1, max_tokens=20)
    gateway.until(lambda: len(gateway.tokens[1]) > 2)
    code, body = engine.get("/drain", "POST")
    assert (code, body["state"]) == (202, "draining")
    gateway.until(lambda: 1 in gateway.ends)
    assert gateway.ends[1].reason == FinishReason.LENGTH
    gateway.generate(2)
    assert gateway.expect(Refused).code == RefusalCode.DRAINING
    engine.until(lambda: engine.get("/drain", "POST")[1]["requests"] == 0)
    assert engine.get("/readyz")[0] == 503
    assert engine.process.poll() is None
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait() == 0


def test_a_killed_rank_stops_the_engine_with_the_reason(start_engine: Start) -> None:
    engine = start_engine()
    engine.ready()
    rank = engine.rank
    rank.kill()
    assert engine.wait() == 1
    text = engine.message.read_text()
    assert f"rank 0 (process {rank.pid}) was killed by signal 9 (SIGKILL" in text
    assert engine.log[-1]["kind"] == "rank_died"


def test_the_watchdog_detects_a_stopped_rank(start_engine: Start) -> None:
    engine = start_engine(watchdog_seconds=3.0)
    engine.ready()
    rank = engine.rank
    time.sleep(4.0)  # an idle engine is not considered hung
    assert engine.get("/readyz")[0] == 200
    rank.suspend()
    assert engine.wait() == 1
    assert "rank 0 made no progress for " in engine.message.read_text()
    assert not psutil.pid_exists(rank.pid)


def test_the_watchdog_detects_a_hung_step(start_engine: Start) -> None:
    engine = start_engine(watchdog_seconds=3.0, hang_after_tokens=5)
    gateway = engine.gateway()
    gateway.generate(1)
    assert engine.wait() == 1
    assert "watchdog: rank 0 made no progress" in engine.message.read_text()
    assert "with 1 requests" in engine.message.read_text()


def test_a_failed_step_ends_streams_with_an_error(start_engine: Start) -> None:
    engine = start_engine(fail_after_tokens=5)
    gateway = engine.gateway()
    gateway.generate(1)
    gateway.until(lambda: 1 in gateway.ends)
    assert gateway.ends[1].reason == FinishReason.ERROR
    assert engine.wait() == 1
    assert "configured to fail after 5 tokens" in engine.message.read_text()


def test_a_failed_startup_reports_its_reason(start_engine: Start) -> None:
    engine = start_engine(fail_start="the weights are torn")
    assert engine.wait() == 1
    assert engine.message.read_text() == "rank_failed: rank 0 failed: RuntimeError: the weights are torn\n"


def test_a_lost_device_has_its_own_exit_code(start_engine: Start) -> None:
    """The exit code makes the operator replace the pod; a restarted container would get the same device."""
    engine = start_engine(fail_start="CUDA error: uncorrectable ECC error encountered")
    assert engine.wait() == 3
    assert engine.message.read_text().startswith("device_lost: rank 0 failed: RuntimeError: CUDA error")


@pytest.mark.parametrize(
    ("words", "is_lost"),
    [
        ("AcceleratorError: CUDA error: uncorrectable ECC error encountered", True),
        ("RuntimeError: No CUDA GPUs are available", True),
        ("RuntimeError: CUDA error: no CUDA-capable device is detected", True),
        ("NVMLError_GpuIsLost: GPU is lost", True),
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", False),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("RuntimeError: CUDA error: device-side assert triggered", False),
        ("FileNotFoundError: config.json", False),
    ],
)
def test_only_faults_that_no_restart_cures_count_as_a_lost_device(words: str, is_lost: bool) -> None:
    assert is_device_lost(words) == is_lost


def test_a_startup_beyond_its_timeout_fails(start_engine: Start) -> None:
    engine = start_engine(start_seconds=60, startup_timeout_seconds=1.5)
    assert engine.wait() == 1
    text = engine.message.read_text()
    phases = "(spawn|import|config|weights)"
    assert re.search(rf"--startup-timeout-seconds 1\.5; it was in phase {phases}", text), text


def test_the_rank_dies_with_its_supervisor(start_engine: Start) -> None:
    engine = start_engine()
    engine.ready()
    rank = engine.rank
    engine.process.kill()
    engine.process.wait(60)
    engine.until(lambda: not is_alive(rank))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "/nowhere"}, "--model /nowhere is not a folder where the engine runs, in its image or a"),
        ({"wire_bind": "tcp://0.0.0.0:5557"}, "needs CURVE keys: give --keys FOLDER"),
        ({"keys": "/nowhere"}, "cannot read the key file /nowhere/engine.public"),
        ({"wire_bind": "5557"}, "use tcp://HOST:PORT"),
        ({"tensor": 2}, "--tensor must be 1 for a simulated engine, not 2"),
    ],
)
def test_an_invalid_configuration_exits_before_any_process_starts(
    start_engine: Start, options: dict[str, Any], words: str
) -> None:
    engine = start_engine(**options)
    assert engine.wait() == 2
    assert words in engine.log[-1]["reason"]
    message = engine.message.read_text()
    assert message.startswith("wrong configuration: ")
    assert words in message


def test_an_http_port_in_use_is_reported_with_its_option(start_engine: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        engine = start_engine(http_port=occupied.getsockname()[1])
        assert engine.wait() == 1
    assert engine.log[-1]["http_port"] == taken_port(engine)
    assert "Address already in use" in engine.log[-1]["reason"]
    assert f"--http-port {taken_port(engine)}: " in engine.message.read_text()


def taken_port(engine: Any) -> int:
    words = engine.process.args
    return int(words[words.index("--http-port") + 1])


def test_logs_contain_no_prompt(start_engine: Start) -> None:
    engine = start_engine()
    gateway = engine.gateway()
    gateway.generate(1, prompt=[987, 654, 321], max_tokens=3)
    gateway.until(lambda: 1 in gateway.ends)
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait() == 0
    assert not any("987" in str(line) and "654" in str(line) for line in engine.log)
    assert all({"time", "level", "event", "process"} <= set(line) for line in engine.log)


def test_the_rank_does_not_inherit_the_supervisors_socket(start_engine: Start) -> None:
    engine = start_engine()
    engine.ready()
    assert engine.port in listening(engine.process.pid)
    assert engine.port not in listening(engine.rank.pid)


def listening(pid: int) -> set[int]:
    return {connection.laddr.port for connection in psutil.Process(pid).net_connections("tcp")}
