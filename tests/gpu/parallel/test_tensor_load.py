# SPDX-License-Identifier: Apache-2.0
"""Several GPUs under load, and engines that exit within seconds when a rank is lost.

MIZZEN_LOAD_SECONDS sets the duration of the random load: 20 by default, 300 for the full test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import tensor_kit
from tensor_kit import RANKS, run_in_process, run_random_load, small_model

from engine_process import EngineProcess
from live_processes import is_alive
from wire_gateway import Gateway

SECONDS = float(os.environ.get("MIZZEN_LOAD_SECONDS", "20"))
RATE = 5.0 if tensor_kit.GPUS > 1 else 0.2
"""Minimum number of requests per second under load; lower if the ranks must take turns on one GPU."""
ENDS_WITHIN = 10.0
"""Seconds from the loss of a rank within which all processes of the group must have exited."""
GONE = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
pytestmark = tensor_kit.several_gpus


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("size", RANKS if tensor_kit.GPUS > 1 else RANKS[:1])
def test_random_load_with_aborts_frees_everything(size: int, tmp_path: Path) -> None:
    results = run_in_process(run_random_load, small_model(tmp_path), size, SECONDS, seconds=SECONDS + 200)
    print(f"random load on {size} ranks: {results}")
    assert results["submitted"] == results["ended"] > RATE * SECONDS
    assert results["aborted"] > 2 * RATE
    assert {results[name] for name in ("errors", "faults", "running", "waiting", "pages")} == {0}


LOST = """
import os, sys, time
import numpy as np, psutil
from mizzen import LLM, SamplingParams
from mizzen.core.request import Request
from mizzen.engine.overlap_loop import StepFailed

options = {"tensor": 2, "skip_tokenizer": True, "kv_cache_tokens": 16384, "load_format": "dummy"}
llm = LLM(sys.argv[1], device="cuda", **options)
children = psutil.Process().children()
(follower,) = (child for child in children if "mizzen.server.ranks.follower" in child.cmdline())
for rid in range(8):
    sampling = SamplingParams(temperature=0, max_tokens=1800, ignore_eos=True)
    llm.engine.submit(Request(rid=rid, prompt=np.arange(3, 20, dtype=np.int32), sampling=sampling))
for _ in range(20):
    llm.engine.step(time.monotonic())
began = time.monotonic()
follower.send_signal(int(sys.argv[2]))
try:
    while True:
        llm.engine.step(time.monotonic())
except StepFailed as error:
    print(f"{time.monotonic() - began:.1f} {error}", flush=True)
llm.close()
os._exit(int(follower.is_running() and follower.status() != psutil.STATUS_ZOMBIE))
"""
"""Program whose engine loses a rank; it is a separate process, because its GPU kernels may never end."""


@GONE
def test_a_killed_rank_fails_the_programs_batch(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOST, str(small_model(tmp_path)), str(int(number))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    print(f"{number.name}: failed after {run.stdout}")
    seconds, _, reason = run.stdout.strip().partition(" ")
    assert "rank 1" in reason
    assert float(seconds) < ENDS_WITHIN


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    """`mizzen engine` on two GPUs."""
    model = small_model(tmp_path)
    started = EngineProcess(tmp_path, device="cuda", model=model, load_format="dummy", kv_cache_tokens=16384)
    yield started
    started.close()


@GONE
def test_a_killed_rank_ends_the_engine_within_ten_seconds(
    number: signal.Signals, engine: EngineProcess
) -> None:
    wire = engine.until(lambda: engine.get("/readyz").get("wire"))
    with closing(Gateway(wire)) as gateway:
        for rid in range(1, 5):
            gateway.generate(rid, prompt=[7, 8, 9], max_tokens=2000, ignore_eos=True, temperature=0.5)
        gateway.until(lambda: len(gateway.tokens[4]) > 5)
        rank_processes = psutil.Process(engine.process.pid).children(recursive=True)
        (follower,) = (child for child in rank_processes if "mizzen.server.ranks.follower" in child.cmdline())
        start_time = time.monotonic()
        follower.send_signal(number)
        assert engine.process.wait(60) == 1
        elapsed = time.monotonic() - start_time
        assert not [process for process in rank_processes if is_alive(process)]
        assert not gateway.ends
    output = engine.message.read_text()
    print(f"{number.name}: ended after {elapsed:.1f} s: {output}")
    assert elapsed < ENDS_WITHIN
    assert f"rank 1 (process {follower.pid})" in output
    assert output.strip().split(": ", 1)[1] in engine.log.read_text()
