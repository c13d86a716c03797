# SPDX-License-Identifier: Apache-2.0
"""An engine with several ranks serves under its supervisor, and all its processes exit if a rank fails."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from engine_process import DEMO, SECONDS, EngineProcess


class Ranks(EngineProcess):
    """`mizzen engine` with two ranks on the CPU."""

    @property
    def follower(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        (follower,) = (child for child in children if "mizzen.server.ranks.follower" in child.cmdline())
        return follower


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    started: list[Ranks] = []

    def make(**options: Any) -> Ranks:
        started.append(Ranks(tmp_path, **options))
        return started[-1]

    yield make
    for ranks in started:
        ranks.close()


RUN_WITH_A_BUSY_PORT = """
import os, socket, sys
from mizzen.server import supervisor
from mizzen.server.config import EngineConfig

def open_descriptors():
    listing = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return {(path, os.readlink(path)) for path in listing if os.path.lexists(path)}

with socket.create_server(("127.0.0.1", 0)) as listener:
    config = EngineConfig(model=sys.argv[1], tensor=2, device="cpu", http_port=listener.getsockname()[1])
    before = open_descriptors()
    try:
        supervisor.Supervisor(config).run()
    except OSError as error:
        print(error)
    print("left open:", sorted(open_descriptors() - before))
"""


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, r"rank_died: rank 1 \(process {pid}\) was killed by signal 9"),
        (signal.SIGSTOP, r"watchdog: rank 1 \(process {pid}\) has not run for"),
    ],
)
def test_a_killed_or_stopped_follower_stops_the_engine_with_the_reason(
    number: signal.Signals, reason: str, start: Callable[..., Ranks], connect: Callable[[str], Any]
) -> None:
    engine = start(rank_deadline_seconds=4)
    wire = engine.until(lambda: engine.get("/readyz").get("wire"))
    gateway = connect(wire)
    gateway.generate(1, prompt=[7, 8, 9], max_tokens=1500, ignore_eos=True, temperature=0.5)
    gateway.until(lambda: len(gateway.tokens[1]) > 5, SECONDS)
    follower, processes = engine.follower, psutil.Process(engine.process.pid).children(recursive=True)
    follower.send_signal(number)
    assert engine.process.wait(SECONDS) == 1
    message = engine.message.read_text()
    assert message.startswith(reason.format(pid=follower.pid).replace("\\", "")), message
    assert message.strip().split(": ", 1)[1] in engine.log.read_text()
    assert not any(process.is_running() for process in processes)


FAULTY = """
import sys, time
if "mizzen.server.ranks.follower" in " ".join(sys.orig_argv):
    from mizzen.engine.execution.runner import CpuRunner

    launch = CpuRunner.launch

    def faulty(self, plan):
        if plan.step > 20:
            FAULT
        launch(self, plan)

    CpuRunner.launch = faulty
"""
"""A sitecustomize module for all processes; it makes a follower fail after 20 steps."""
FAULTS = {
    "memory": (
        "raise MemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')",
        r"rank_failed: rank 1 failed: MemoryError: CUDA out of memory",
    ),
    "hang": (
        "time.sleep(600)",
        r"watchdog: rank 1 \(process \d+\) has been at step 20 for \d+\.\d s, others are at 2\d",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_or_hung_follower_is_reported_as_the_root_cause(
    fault: str,
    start: Callable[..., Ranks],
    connect: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 is also affected: it fails because its connections close, or it waits for the follower."""
    code, reason = FAULTS[fault]
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(FAULTY.replace("FAULT\n", f"{code}\n"))
    monkeypatch.setenv("PYTHONPATH", str(site))
    engine = start(rank_deadline_seconds=3)
    wire = engine.until(lambda: engine.get("/readyz").get("wire"))
    gateway = connect(wire)
    gateway.generate(1, prompt=[7, 8, 9], max_tokens=1500, ignore_eos=True, temperature=0.5)
    assert engine.process.wait(SECONDS) == 1
    assert re.match(reason, engine.message.read_text()), engine.message.read_text()


PAUSED = """
import sys
if "mizzen.server.ranks.follower" in " ".join(sys.orig_argv):
    import os, signal
    from mizzen.parallel import process_group as group

    def pause(*given):
        os.kill(os.getpid(), signal.SIGSTOP)

    group.open_store = pause
elif "engine" in sys.orig_argv:
    from mizzen.server.ranks import stall_detector

    stall_detector.STARTUP_SECONDS = 5.0
"""
"""A sitecustomize module for all processes; it stops a follower (SIGSTOP) as soon as the follower loads."""


def test_a_rank_stopped_during_loading_is_reported(
    start: Callable[..., Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(PAUSED)
    monkeypatch.setenv("PYTHONPATH", str(site))
    engine = start(rank_deadline_seconds=3)
    assert engine.process.wait(SECONDS) == 1
    message = engine.message.read_text()
    assert re.match(r"watchdog: rank 1 \(process \d+\) has not run for [56]\.\d s: it is stopped", message), (
        message
    )


def test_a_pause_of_all_processes_is_ignored_but_a_later_stop_is_detected(
    start: Callable[..., Ranks],
) -> None:
    engine = start(rank_deadline_seconds=2, watchdog_seconds=3)
    engine.until(lambda: engine.get("/readyz").get("wire"))
    supervisor = psutil.Process(engine.process.pid)
    processes = [supervisor, *supervisor.children()]
    for process in processes:
        process.suspend()
    time.sleep(5)
    for process in processes:
        process.resume()
    time.sleep(1)
    assert engine.get("/readyz").get("state") == "serving", engine.log.read_text()
    follower = engine.follower
    follower.suspend()
    began = time.monotonic()
    assert engine.process.wait(SECONDS) == 1
    assert time.monotonic() - began < 10
    assert engine.message.read_text().startswith(f"watchdog: rank 1 (process {follower.pid}) has not run for")


def test_an_http_port_in_use_leaves_no_descriptor_open() -> None:
    command = [
        sys.executable,
        "-c",
        RUN_WITH_A_BUSY_PORT,
        str(DEMO),
    ]  # in a new process, which has no other threads
    run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert "in use" in run.stdout, run.stderr
    assert "left open: []" in run.stdout


def test_sigterm_exits_all_ranks_cleanly(start: Callable[..., Ranks]) -> None:
    engine = start()
    engine.until(lambda: engine.get("/readyz").get("wire"))
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(SECONDS) == 0
    assert not engine.message.exists()


def test_a_rank_that_cannot_start_stops_the_engine(start: Callable[..., Ranks]) -> None:
    engine = start(kv_cache_tokens=10**12)
    assert engine.process.wait(SECONDS) == 1
    assert "--kv-cache-tokens 1000000000000 needs" in engine.message.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"profile": "/proc/x"}, "wrong configuration: --profile /proc/x is not a writable folder"),
        ({"kv_cache_dtype": "fp8"}, "wrong configuration: --kv-cache-dtype fp8 needs --device cuda"),
        ({"context_length": 10**6}, "wrong configuration: --context-length 1000000 exceeds"),
        (
            {"attention_decode": "fa3"},
            "wrong configuration: rank 0 failed: ValueError: --attention-decode fa3 does not run here",
        ),
    ],
)
def test_an_invalid_configuration_exits_before_weights_are_read(
    options: dict[str, Any], words: str, start: Callable[..., Ranks]
) -> None:
    engine = start(tensor=1, **options)
    assert engine.process.wait(SECONDS) == 2
    assert engine.message.read_text().startswith(words)
    assert '"weights"' not in engine.log.read_text()


def test_a_checkpoint_without_a_tensor_is_an_invalid_configuration(
    tmp_path: Path, start: Callable[..., Ranks]
) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    engine = start(model=folder)
    assert engine.process.wait(SECONDS) == 2
    text = engine.message.read_text()
    assert text.startswith("wrong configuration: rank ")
    assert "tensors are missing: model.norm.weight" in text


def test_indivisible_heads_are_rejected_before_any_rank_starts(start: Callable[..., Ranks]) -> None:
    engine = start(tensor=3)
    assert engine.process.wait(SECONDS) == 2
    assert "num_attention_heads (4) must be a multiple of the tensor ranks (3)" in engine.message.read_text()
