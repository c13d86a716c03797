# SPDX-License-Identifier: Apache-2.0
"""Helpers of the command line tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import openai
import psutil

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models/demo"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def mizzen(*arguments: str) -> list[str]:
    """Return a command line of this installation's `mizzen`."""
    return [sys.executable, "-m", "mizzen.cli", *arguments]


class Served:
    """A running `mizzen serve` with a model on the CPU."""

    def __init__(self, *options: str, model: Path = MODEL) -> None:
        command = mizzen("serve", str(model), "--device=cpu", "--threads=1", "--port=0", *options)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        assert self.process.stdout
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            raise AssertionError(self.process.communicate(timeout=60)[1])

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60)

    def children(self) -> dict[str, psutil.Process]:
        """Return the child processes of `serve` by name: "engine" and "gateway"."""
        processes = {}
        for child in psutil.Process(self.process.pid).children():
            words = child.cmdline()
            processes[words[words.index("mizzen.cli") + 1]] = child
        return processes

    def tree(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> tuple[int, str]:
        """Wait for the exit; return the exit code and standard error."""
        errors = self.process.communicate(timeout=60)[1]
        return self.process.returncode, errors


def stop(served: Served) -> None:
    if served.process.poll() is None:
        served.process.terminate()
        served.end()
