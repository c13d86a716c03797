# SPDX-License-Identifier: Apache-2.0
"""benchmarks/online.py, run against a real `mizzen serve`."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from cli_support import ENVIRONMENT, ROOT, Served

pytestmark = [pytest.mark.xdist_group("cli")]
COMMAND = [sys.executable, str(ROOT / "benchmarks/online.py")]


def online(*options: str) -> tuple[int, list[str]]:
    result = subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, env=ENVIRONMENT, timeout=150, check=False
    )
    assert not result.stderr
    return result.returncode, result.stdout.splitlines()


def test_every_request_at_every_rate_is_answered_and_counted(served: Served) -> None:
    code, lines = online(
        served.url, "--rate", "20", "60", "--requests", "12", "--input", "U(5,40)", "--output", "D(6)",
        "--vocabulary", "300", "--processes", "2", "--json",
    )  # fmt: skip
    assert code == 0
    runs = json.loads(lines[-1])["runs"]
    assert list(runs) == ["rate 20", "rate 60"]
    for run in runs.values():
        assert (run["requests"], run["errors"], run["output_tokens"]) == (12, {}, 72)
        assert run["prompt_tokens"] >= 60
        assert 0 < run["first_token_ms"]["p50"] <= run["whole_ms"]["max"]
    assert len([line for line in lines if re.match(r" +rate \d+ ", line)]) == 2


def test_later_turns_of_a_chat_hit_the_prefix_cache(served: Served) -> None:
    code, lines = online(
        served.url, "--text", "--chat", "--rate", "50", "--requests", "6", "--turns", "3", "--think", "0.01",
        "--input", "40", "--output", "5", "--eos", "--json",
    )  # fmt: skip
    assert code == 0
    run = json.loads(lines[-1])["runs"]["rate 50"]
    assert run["requests"] == 6
    assert run["cached_tokens"] > 100


def test_errors_are_reported_and_fail_the_command(served: Served) -> None:
    code, lines = online(served.url, "--model", "other", "--requests", "2", "--rate", "50")
    assert code == 1
    assert "2 x status 404" in "\n".join(lines)
