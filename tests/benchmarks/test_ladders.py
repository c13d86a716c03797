"""The ladders of benchmarks/ run to their end on the CPU, with a tiny shape."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from limits import Limits, limits_of

from gpu import SHAPES, engine_option, parser
from mizzen.models.registry import read_config

ROOT = Path(__file__).parents[2]
COMMON = (
    "--shape=tiny",
    "--device=cpu",
    "--rounds=1",
    "--engine",
    "kv_cache_tokens=4096",
    "threads=1",
)
LADDERS = {
    "decode": (["--batch", "1", "2", "--context", "20"], "steps"),
    "offline": (["--batch", "3", "--context", "12", "--output", "5"], "tokens_per_second"),
    "prefill": (["--batch", "2", "--context", "40"], "prefill"),
    "prefix": (["--context", "64", "--own", "8", "--batch", "2"], "first_token"),
    "mixed": (["--batch", "2", "--context", "64", "--prompts", "2"], "median"),
    "startup": (["--context", "512"], "startup"),
}


def benchmark(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / f"benchmarks/{name}.py"), *options],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def told_by(name: str, *options: str) -> tuple[dict, list[str]]:
    done = benchmark(name, *options, "--json")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    return json.loads(last), lines


def ladder(name: str, *options: str) -> tuple[dict, list[str]]:
    return told_by(name, *options, *COMMON)


@pytest.mark.parametrize("name", sorted(LADDERS))
def test_a_ladder_tells_figure_limit_and_share(name: str) -> None:
    options, result = LADDERS[name]
    told, lines = ladder(name, *options)
    assert told[result]
    assert told["options"]["shape"] == "tiny"
    assert lines[1].split() == ["work", "measured", "limit", "of", "limit"]
    assert any(line.split()[-1].endswith("%") or "% " in line for line in lines[2:])


def test_limits_of_several_ranks_are_told_with_collectives_too() -> None:
    told, lines = ladder("decode", "--tensor", "2", "--batch", "2", "--context", "20")
    step = told["steps"]["2"]
    assert step["limit_with_collectives_ms"] > step["limit_ms"] + 5 * 2.9e-3
    assert any("with collectives: " in line for line in lines)


def test_backends_of_attention_are_compared() -> None:
    options = ("--shape=tiny", "--device=cpu", "--rounds=1", "--window=24", "--kv-heads=2")
    told, lines = told_by("attention", *options, "--batch", "1", "2", "--context", "40", "--chunk", "16")
    assert list(told["attention"]) == ["decode 1 x 40", "decode 2 x 40", "chunk 0+16"]
    for found in told["attention"].values():
        assert found["auto"] == "cpu" and set(found["backends"]) == {"cpu", "reference"}
    # A window of 24 tokens is read: 2 KV heads of 16 numbers, keys and values, 2 bytes each.
    assert told["attention"]["decode 2 x 40"]["limit_us"] == pytest.approx(2 * 24 * 128 / 4.28e6)
    assert sum(line.endswith("auto") for line in lines) == 3


def test_what_does_not_run_is_said_and_passed_over() -> None:
    options = ("--shape=tiny", "--device=cpu", "--rounds=1", "--batch", "1", "--context", "20", "--chunk")
    told, lines = told_by("attention", *options, "--decode", "fa3", "reference")
    assert list(told["attention"]["decode 1 x 20"]["backends"]) == ["reference"]
    assert any("fa3: attention fa3 does not run here: it needs a Hopper GPU" in line for line in lines)


def test_products_are_measured_by_kernel() -> None:
    options = ("--shape=tiny", "--device=cpu", "--rounds=1", "--tensor=2", "--batch", "1", "4")
    told, _ = told_by("products", *options)
    assert len(told["products"]) == 10
    assert all(list(found["kernels"]) == ["library"] for found in told["products"].values())


def test_every_policy_and_eviction_costs_a_step() -> None:
    told, _ = told_by("scheduler_step", "--sizes", "4", "--steps", "60", "--all")
    assert len(told["runs"]) == 9
    assert {"fcfs, lru", "dfs-weight, lru", "fcfs, slru", "fcfs, priority"} <= set(told["runs"])
    assert all(figures["page_size_16"]["all_us"]["4"] > 0 for figures in told["runs"].values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("name", ["decode", "startup", "attention", "products", "grammar"])
def test_without_a_gpu_it_says_so(name: str) -> None:
    done = benchmark(name)
    assert done.returncode == 1
    assert done.stderr == "no GPU is here; --device cpu --shape tiny only tells whether all works\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--attention", "quick"), "the engine cannot be loaded: --attention-prefill must be one of auto, "),
        (("--work", "16by1"), "'16by1' is not like 16x1024"),
    ],
)
def test_wrong_options_are_named(options: tuple[str, ...], message: str) -> None:
    done = benchmark("prefill", *COMMON, *options)
    assert done.returncode and message in done.stderr and "Traceback" not in done.stderr


def test_parts_are_turned_off_one_by_one() -> None:
    told, lines = ladder("prefill", "--work", "1x16", "--ablate")
    assert list(told["variants"]) == ["all on", "graphs off", "overlap off", "prefix cache off", "fusion off"]
    assert [line for line in lines if line.startswith("tiny")] == [
        f"tiny, {name}" for name in told["variants"]
    ]


def limits(shape: str, tmp_path: Path, *options: str) -> Limits:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
    return limits_of(parser("limits").parse_args(options), read_config(tmp_path))


def test_limits_are_those_of_bytes_and_operations(tmp_path: Path) -> None:
    small, large = limits("qwen3-0.6b", tmp_path), limits("qwen3-8b", tmp_path)
    # 1.19 GB of weights and 114,688 bytes of KV a token, at 4.28 TB/s.
    assert small.decode(1, 1096) * 1e3 == pytest.approx(0.31, abs=0.005)
    assert small.decode(256, 1096) * 1e3 == pytest.approx(7.9, abs=0.02)
    assert large.decode(1, 1096) * 1e3 == pytest.approx(3.58, abs=0.03)
    assert large.prefill(8192) * 1e3 == pytest.approx(167, abs=1)
    big = limits("qwen3-32b", tmp_path, "--tensor", "4")
    assert big.decode(1, 1024) * 1e3 == pytest.approx(3.74, abs=0.03)
    assert big.collectives(1, 1) * 1e6 == pytest.approx(129 * 7.0, rel=0.01)
    # 2.6 MB a sum, of which a GPU gets three quarters twice, and the logits of three others.
    assert big.sum(256) * 1e6 == pytest.approx(8.74, abs=0.01)
    assert big.collectives(256, 256) * 1e3 == pytest.approx(1.26, abs=0.01)
    assert limits("qwen3-32b", tmp_path, "--tensor", "4", "--least-sum", "20").sum(1) == pytest.approx(20e-6)
    assert large.collectives(256, 256) == 0
    assert limits("qwen3-8b", tmp_path, "--kv-cache-dtype", "fp8").token_bytes * 2 == large.token_bytes


def test_engine_options_have_their_kinds() -> None:
    assert engine_option("kv-cache-tokens=12") == ("kv_cache_tokens", 12)
    assert engine_option("memory_fraction=0.5") == ("memory_fraction", 0.5)
    assert engine_option("check_integrity=true") == ("check_integrity", True)
    assert engine_option("policy=lpm") == ("policy", "lpm")
    with pytest.raises(argparse.ArgumentTypeError, match="'speed=9' is no NAME=VALUE"):
        engine_option("speed=9")
