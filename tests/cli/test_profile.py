# SPDX-License-Identifier: Apache-2.0
"""SIGUSR2 makes a serving engine write a trace; in all other states the signal is ignored."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_support import ENVIRONMENT, MODEL, Served, mizzen

pytestmark = [pytest.mark.xdist_group("cli")]


def say(served: Served) -> None:
    served.client().completions.create(model="demo", prompt="Hello", max_tokens=8, temperature=0)


@pytest.mark.parametrize("to", ["serve", "engine"])
def test_sigusr2_takes_a_trace(to: str, serve: Callable[..., Served], tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    served = serve(f"--profile={folder}", "--profile-steps=3")
    target = served.process if to == "serve" else served.children()["engine"]
    target.send_signal(signal.SIGUSR2)
    deadline = time.monotonic() + 120
    while not list(folder.glob("steps-*.json.gz")):
        say(served)
        assert time.monotonic() < deadline, "no trace came"
    say(served)


def test_sigusr2_without_a_trace_folder_does_nothing(served: Served) -> None:
    served.children()["engine"].send_signal(signal.SIGUSR2)
    served.process.send_signal(signal.SIGUSR2)
    say(served)
    assert served.process.poll() is None


def test_sigusr2_during_loading_does_nothing() -> None:
    command = mizzen("serve", str(MODEL), "--device=cpu", "--threads=1", "--port=0", "--profile=traces")
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert process.stderr
    for line in process.stderr:  # the first output of the engine or of `serve`
        if "mizzen: " in line or "process" in line:
            break
    process.send_signal(signal.SIGUSR2)
    for line in process.stderr:
        if "SIGUSR2 ignored" in line:
            break
    assert process.stdout
    assert process.stdout.readline().startswith("http://")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 0
