# SPDX-License-Identifier: Apache-2.0
"""A program that has lost a rank exits, even if a GPU call never returns; fakes replace the GPU calls."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

LAUNCH = """
import sys, time
import psutil
from mizzen import LLM, SamplingParams
from mizzen.engine.execution.runner import CpuRunner

launch = CpuRunner.launch
llm = LLM(sys.argv[1], device="cpu", tensor=2, skip_tokenizer=True, kv_cache_tokens=1024, threads=1)


def full(self, plan):
    if plan.step == 5:
        for child in psutil.Process().children():
            child.kill()
        time.sleep(600)  # as a launch into a full queue
    launch(self, plan)


CpuRunner.launch = full
llm.generate([[3, 4, 5]], SamplingParams(max_tokens=50, ignore_eos=True))
"""
END = """
import atexit, sys, time
from mizzen.server.ranks import launch_guard

launch_guard.EXIT_SECONDS = 2
atexit.register(time.sleep, float(sys.argv[1]))  # as memory that is freed once the GPU is done
launch_guard.arm_exit_alarm()
raise SystemExit(7)
"""


THREAD = """
import sys, threading, time
from mizzen import LLM, SamplingParams

made = []


def make():
    llm = LLM(sys.argv[1], device="cpu", tensor=2, skip_tokenizer=True, kv_cache_tokens=1024, threads=1)
    made.append(llm)


thread = threading.Thread(target=make)
thread.start()
thread.join()
time.sleep(0.5)
print(len(made[0].generate([[3, 4, 5]], SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids))
CLOSE
"""


def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_the_program_exits_although_a_launch_never_returns(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_model(tmp_path, "llama")
    process = run(LAUNCH, str(tmp_path))
    assert process.returncode == 1, process.stderr
    assert "exiting because the GPU waits for a rank that is gone: rank 1 (process" in process.stderr
    assert "exited unexpectedly with code -9" in process.stderr


@pytest.mark.parametrize("close", ["", "made[0].close()"])
def test_ranks_outlive_their_starting_thread_but_not_the_program(
    close: str, kit: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is created in a thread that ends, as in `asyncio.to_thread(LLM, ...)`."""
    kit.save_model(tmp_path / "model", "llama")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    process = run(THREAD.replace("CLOSE", close), str(tmp_path / "model"))
    assert (process.returncode, process.stdout) == (0, "5\n"), process.stderr
    assert not list((tmp_path / "temporary").glob("mizzen*"))


def test_an_exit_that_hangs_is_forced() -> None:
    assert run(END, "600").returncode == -signal.SIGALRM


def test_an_exit_in_time_is_not_forced() -> None:
    assert run(END, "0").returncode == 7
