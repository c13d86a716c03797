# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmarks of images run on a CPU, too, to check that everything works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(program: str, *options: str) -> dict[str, Any]:
    """Run a benchmark on the CPU, and return the JSON object that it prints."""
    command = [sys.executable, str(BENCHMARKS / "images" / program), "--device", "cpu", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_encoder_is_timed() -> None:
    shapes = run("encoder.py", "--edge", "64", "--rounds", "1", "--batch", "1", "2")["shapes"]
    assert set(shapes) == {"tiny-vl"}
    assert shapes["tiny-vl"]["operations"] > 1e6
    assert 0 < shapes["tiny-vl"]["seconds_1"]["launches"] <= shapes["tiny-vl"]["seconds_1"]["whole"]


def test_streams_go_on_while_images_arrive_and_repeated_images_are_cached() -> None:
    options = "--shape tiny-vl --streams 2 --rate 20 --seconds 0.2 --edge 64 --text-prompt 20"
    result = run("mixed.py", *options.split())
    assert set(result["phases"]) == {
        "streams alone", "text arrives", "images arrive", "alone, image streams", "text, image streams",
    }  # fmt: skip
    assert all(0 < phase["p50_ms"] <= phase["p99_ms"] for phase in result["phases"].values())
    assert result["repeated"] == {"decoded": 0, "encoded": 0, "hit_share": pytest.approx(1)}
