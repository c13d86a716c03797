# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmarks run on the CPU with a tiny shape, and compute hardware limits correctly."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import gpu_all
import numpy as np
import offline
import pytest
import torch
from attention import chunk_limit, decode_limit
from common_parts.engine_options import engine_options
from common_parts.gpu import benchmark_parser
from common_parts.limits import Limits, limits_of
from common_parts.shapes import config_of

from mizzen.attention.base import Geometry

ROOT = Path(__file__).parents[2]
COMMON = (
    "--shape=tiny",
    "--device=cpu",
    "--rounds=1",
    "--engine",
    "kv_cache_tokens=4096",
    "threads=1",
)
SMALL_RUNS = {
    "decode": (["--batch", "1", "2", "--context", "20"], "steps"),
    "offline": (["--batch", "3", "--context", "12", "--output", "5"], "tokens_per_second"),
    "prefill": (["--batch", "2", "--context", "40"], "prefill"),
    "prefix": (["--context", "64", "--own", "8", "--batch", "2"], "first_token"),
    "mixed": (["--batch", "2", "--context", "64", "--prompts", "2"], "median"),
    "startup": (["--context", "512"], "startup"),
}


Completed = subprocess.CompletedProcess[str]


def benchmark_process(name: str, *options: str) -> Completed:
    """Run a benchmark in a new process, and return its exit code and output."""
    return subprocess.run(
        [sys.executable, str(ROOT / f"benchmarks/{name}.py"), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def benchmark(name: str, *options: str) -> Completed:
    """Run a benchmark in this process, which has imported PyTorch already; return how a process would end."""
    output, errors, code = io.StringIO(), io.StringIO(), 0
    arguments = [f"{name}.py", *options]
    with redirect_stdout(output), redirect_stderr(errors), mock.patch.object(sys, "argv", arguments):
        try:
            importlib.import_module(name).main()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
            if isinstance(exit_.code, str):
                print(exit_.code, file=sys.stderr)
    return Completed(arguments, code, output.getvalue(), errors.getvalue())


def run_json(name: str, *options: str, run: Callable[..., Completed] = benchmark) -> tuple[dict, list[str]]:
    process = run(name, *options, "--json")
    assert process.returncode == 0, process.stderr
    *lines, last = process.stdout.splitlines()
    return json.loads(last), lines


def run_small(name: str, *options: str) -> tuple[dict, list[str]]:
    return run_json(name, *options, *COMMON)


@pytest.mark.parametrize("name", sorted(SMALL_RUNS))
def test_a_benchmark_reports_figures_and_on_a_cpu_no_limit(name: str) -> None:
    options, key = SMALL_RUNS[name]
    result, lines = run_small(name, *options)
    assert result[key]
    assert result["options"]["shape"] == "tiny"
    assert lines[1].split() == ["work", "measured", "limit", "of", "limit"]
    assert lines[2].split()[-1] != "0%" and " - " in f"{lines[2]} "
    assert not any("limit" in line or "% " in f"{line} " for line in lines[2:])
    printed = [line for line in lines[2:] if line.split("  ")[-1:] == ["-"] or "  -  " in line]
    assert [row["work"] for row in result["rows"]] == [line[:28].strip() for line in printed]
    for row, line in zip(result["rows"], printed, strict=True):
        assert f"{row['figure']:,.2f} {row['unit']} " in line
        assert row["limit"] is row["share"] is None and len(row["rounds"]) == 1
    assert result["machine"]["torch"] == torch.__version__
    assert result["machine"]["gpu"] is None
    assert result["machine"]["sm_clock_mhz"] == {"before": None, "after": None}


def test_logs_of_several_ranks_stay_out_of_the_table() -> None:
    process = benchmark_process("decode", "--batch", "2", "--context", "20", *COMMON, "tensor=2", "--json")
    *lines, last = process.stdout.splitlines()
    assert (process.returncode, process.stderr) == (0, "")
    assert lines[0] == "tiny, 2 GPUs"
    step = json.loads(last)["steps"]["2"]
    assert step["ms"] > 0
    assert step["limit_ms"] is step["limit_with_collectives_ms"] is step["share"] is None


def test_attention_backends_are_compared() -> None:
    options = ("--shape=tiny", "--device=cpu", "--rounds=1", "--window=24", "--kv-heads=2")
    result, lines = run_json("attention", *options, "--batch", "1", "2", "--context", "40", "--chunk", "16")
    assert list(result["attention"]) == ["decode 1 x 40", "decode 2 x 40", "chunk 0+16"]
    for times in result["attention"].values():
        assert times["auto"] == "cpu" and set(times["backends"]) == {"cpu", "reference"}
        assert times["limit_us"] is None
    assert sum(line.endswith("auto") for line in lines) == 3
    assert len(result["rows"]) == 6 and result["rows"][0]["work"] == "1 x 40, cpu"


def test_attention_limits_account_for_the_window() -> None:
    args = benchmark_parser("limits").parse_args(["--bandwidth", "4.28", "--tflops", "799"])
    args.prefix = 10
    geometry = Geometry(heads=8, kv_heads=2, head_dim=16, windows=(24,))
    # A window of 24 tokens is read: 2 KV heads of 16 values, keys and values, 2 bytes each.
    assert decode_limit(args, geometry, np.full(2, 40, np.int32)) == pytest.approx(2 * 24 * 128 / 4.28e12)
    assert chunk_limit(args, geometry, 3) == pytest.approx(4 * 8 * 16 * (11 + 12 + 13) / 799e12)
    args.device = "cpu"
    assert math.isnan(decode_limit(args, geometry, np.full(2, 40, np.int32)))


def test_a_backend_that_does_not_run_is_reported_and_skipped() -> None:
    options = ("--shape=tiny", "--device=cpu", "--rounds=1", "--batch", "1", "--context", "20", "--chunk")
    result, lines = run_json("attention", *options, "--decode", "fa3", "reference")
    assert list(result["attention"]["decode 1 x 20"]["backends"]) == ["reference"]
    assert any("fa3: attention fa3 does not run here: it needs a Hopper GPU" in line for line in lines)


def test_gemms_are_measured_by_kernel() -> None:
    options = ("--shape=tiny", "--device=cpu", "--rounds=1", "--tensor=2", "--batch", "1", "4")
    result, _ = run_json("products", *options)
    assert len(result["products"]) == 10
    assert all(list(product["kernels"]) == ["library"] for product in result["products"].values())
    assert len(result["rows"]) == 10


def test_experts_are_compared_with_a_loop() -> None:
    result, _ = run_json("experts", "--shape=tiny", "--device=cpu", "--rounds=1")
    assert list(result["experts"]["tiny"]) == ["1", "8"]
    for batch in result["experts"]["tiny"].values():
        assert list(batch["kernels"]) == ["pytorch"] and batch["kernels"]["pytorch"]["error"] < 1e-5


def test_every_policy_and_eviction_is_measured() -> None:
    result, _ = run_json("scheduler_step", "--sizes", "4", "--steps", "60", "--all")
    assert len(result["runs"]) == 9
    assert {"fcfs, lru", "dfs-weight, lru", "fcfs, slru", "fcfs, priority"} <= set(result["runs"])
    assert all(figures["page_size_16"]["all_us"]["4"] > 0 for figures in result["runs"].values())


@pytest.mark.slow
def test_gpu_all_runs_every_benchmark_into_one_table() -> None:
    options = ("--device=cpu", "--shape=tiny", "--rounds=1")
    result, lines = run_json("gpu_all", *options, run=benchmark_process)
    programs = [f"{name}.py" for name in ("offline", "decode", "prefill", "prefix", "mixed", "startup")]
    assert [command.split()[0] for command in result["machines"]] == programs
    assert not result["failed"]
    begin = lines.index("| work | figure | limit | of the limit |")
    cells = [line.strip("|").split(" | ") for line in lines[begin + 2 :]]
    assert len(cells) == len(result["rows"]) and {len(row) for row in cells} == {4}
    assert {row["command"].split()[0] for row in result["rows"]} == set(programs)
    assert all(row["figure"] > 0 for row in result["rows"])


def test_gpu_all_continues_after_a_failed_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"work": "w", "figure": 1234.5, "unit": "tok/s", "limit": 2000.0, "share": 0.617, "rounds": [1]}
    machine = {"gpu": "GPU", "driver": "1.2", "torch": "2", "commit": None}
    results = {"a.py": {"rows": [row], "machine": machine}, "b.py": None}
    monkeypatch.setattr(gpu_all, "commands", lambda device, shape: list(results))
    monkeypatch.setattr(gpu_all, "run_benchmark", lambda command, rounds: results[command])
    monkeypatch.setattr(sys, "argv", ["gpu_all.py"])
    assert gpu_all.main() == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "GPU, driver 1.2, PyTorch 2"
    assert out.splitlines()[-1] == "| `a.py`: w | 1,234.50 tok/s | 2,000.00 tok/s | 62% |"
    assert err == "failed: b.py\n"


def test_gpu_all_runs_each_command_once() -> None:
    assert gpu_all.commands("cuda", None) == list(gpu_all.RUNS)
    assert gpu_all.commands("cuda", "llama-3.1-8b")[:2] == [
        "offline.py --shape llama-3.1-8b",
        "decode.py --shape llama-3.1-8b --batch 1 32 256",
    ]
    assert len(gpu_all.commands("cpu", None)) == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["decode", "startup", "attention", "products", "experts", "grammar"])
def test_without_a_gpu_a_benchmark_fails_with_a_hint(name: str) -> None:
    process = benchmark(name)
    assert process.returncode == 1
    assert process.stderr == "no GPU found; --device cpu --shape tiny only checks that everything works\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--attention", "quick"), "the engine cannot be loaded: --attention-prefill must be one of auto, "),
        (("--work", "16by1"), "'16by1' is not like 16x1024"),
    ],
)
def test_invalid_options_are_named(options: tuple[str, ...], message: str) -> None:
    process = benchmark("prefill", *COMMON, *options)
    assert process.returncode and message in process.stderr and "Traceback" not in process.stderr


def test_ablate_turns_off_one_part_at_a_time() -> None:
    result, lines = run_small("prefill", "--work", "1x16", "--ablate")
    assert list(result["variants"]) == ["all on", "overlap off", "prefix cache off"]
    titles = [line for line in lines if line.startswith("tiny")]
    assert titles == ["tiny, all on", "tiny, overlap off", "tiny, prefix cache off", "tiny, all on again"]
    first, last = result["variants"]["all on"], result["again"]
    assert result["drift"] == {"1x16": last["rows"][0]["figure"] / first["rows"][0]["figure"] - 1}
    assert result["left_out"] == {"graphs off": "not on a CPU", "fusion off": "not on a CPU"}
    assert lines[-4] == "drift of all on, from the first run to the last:"
    assert lines[-3].split() == ["1x16", f"{result['drift']['1x16']:+.1%}"]
    assert lines[-2:] == ["left out: graphs off: not on a CPU", "left out: fusion off: not on a CPU"]


def limits(shape: str, *options: str) -> Limits:
    args = benchmark_parser("limits").parse_args(["--bandwidth", "4.28", "--tflops", "799", *options])
    return limits_of(args, config_of(shape), engine_options(args))


def test_limits_follow_from_bytes_and_operations() -> None:
    small, large = limits("qwen3-0.6b"), limits("qwen3-8b")
    # 1.19 GB of weights and 114,688 bytes of KV per token, at 4.28 TB/s.
    assert small.decode(1, 1096) * 1e3 == pytest.approx(0.31, abs=0.005)
    assert small.decode(256, 1096) * 1e3 == pytest.approx(7.9, abs=0.02)
    assert large.decode(1, 1096) * 1e3 == pytest.approx(3.58, abs=0.03)
    assert large.prefill(8192) * 1e3 == pytest.approx(167, abs=1)
    big = limits("qwen3-32b", "--tensor", "4")
    assert big.decode(1, 1024) * 1e3 == pytest.approx(3.74, abs=0.03)
    assert big.collectives(1, 1) * 1e6 == pytest.approx(129 * 7.0, rel=0.01)
    # In an all-reduce of 2.6 MB, a GPU receives three quarters of it twice; then it gets three ranks' logits.
    assert big.all_reduce(256) * 1e6 == pytest.approx(8.74, abs=0.01)
    assert big.collectives(256, 256) * 1e3 == pytest.approx(1.26, abs=0.01)
    assert limits("qwen3-32b", "--tensor", "4", "--least-sum", "20").all_reduce(1) == pytest.approx(20e-6)
    assert large.collectives(256, 256) == 0
    assert limits("qwen3-8b", "--kv-cache-dtype", "fp8").token_bytes * 2 == large.token_bytes
    assert math.isnan(limits("qwen3-8b", "--device", "cpu", "--tensor", "2").collectives(1, 1))


def test_limits_of_a_mixture_count_the_experts_that_a_batch_is_expected_to_choose() -> None:
    mixture = limits("qwen3-30b-a3b")
    expert = 3 * 2048 * 768
    read = [mixture.weight_bytes(rows) / 2 - mixture.weight_bytes(0) / 2 for rows in (1, 2, 1000)]
    assert read == pytest.approx([48 * count * expert for count in (8, 15.5, 128)])
    assert mixture.body == 48 * (8 * expert + 2048 * 128 * 72)
    assert mixture.decode(1, 0) == pytest.approx(2 * (mixture.body + mixture.head) / mixture.bandwidth)
    assert mixture.prefill(8192) == mixture.operations(8192) / mixture.flops


def test_prefill_limits_are_the_longer_of_operations_and_reads() -> None:
    large = limits("qwen3-8b")
    assert large.prefill(8192) * 1e3 == pytest.approx(169, abs=2)
    assert large.prefill(8192) == large.operations(8192) / 799e12
    # Two short prompts that run together read the weights only once.
    assert large.prefill(1) * 1e3 == pytest.approx(3.54, abs=0.01)
    assert large.prefill(30, 40) == large.prefill(70) == large.prefill(1)
    # 8192 tokens of KV are 1.2 GB. All prompts that share them read them once, so operations set the limit.
    assert large.prefill(64, start=8192) * 1e3 == pytest.approx(3.54 + 0.28, abs=0.01)
    assert large.prefill(64, 64, start=8192) == large.prefill(64, start=8192)
    assert large.prefill(*[64] * 8, start=8192) == 8 * large.operations(64, 8192) / 799e12
    assert large.operations(64, 8192) > large.operations(64) + 4 * 36 * 32 * 128 * 64 * 8000
    half = limits("qwen3-8b", "--kv-cache-dtype", "fp8")
    assert half.prefill(64, start=8192) * 1e3 == pytest.approx(3.54 + 0.14, abs=0.01)
    assert math.isnan(limits("qwen3-8b", "--device", "cpu").prefill(64, start=8192))


@pytest.mark.parametrize(("shape", "rate"), [("qwen3-0.6b", 36_100), ("qwen3-8b", 12_700)])
def test_the_offline_limit_adds_prompts_and_decode_steps(shape: str, rate: float) -> None:
    args = benchmark_parser("limits").parse_args([])
    args.batch, args.context, args.output = offline.SEQUENCES, None, None
    prompts, outputs = offline.lengths(args)
    least, communication = offline.limit(limits(shape), prompts, outputs, offline.SEQUENCES)
    assert sum(outputs) / least == pytest.approx(rate, rel=0.005)
    assert communication == 0


def test_the_offline_limit_of_fewer_running_requests_is_higher() -> None:
    shape = limits("qwen3-8b")
    together, _ = offline.limit(shape, [10, 10, 10, 10], [3, 3, 3, 3], 4)
    in_turn, _ = offline.limit(shape, [10, 10, 10, 10], [3, 3, 3, 3], 2)
    assert together == pytest.approx(shape.prefill(40) + shape.decode(4, 11) + shape.decode(4, 12))
    assert in_turn == pytest.approx(shape.prefill(40) + 2 * (shape.decode(2, 11) + shape.decode(2, 12)))


def test_limits_follow_the_options_of_the_engine() -> None:
    def same(flags: tuple[str, ...], *named: str) -> None:
        by_flag, by_name = limits("qwen3-8b", *flags), limits("qwen3-8b", "--engine", *named)
        assert by_flag.decode(8, 1000) == by_name.decode(8, 1000) != limits("qwen3-8b").decode(8, 1000)
        assert by_flag.collectives(8, 8) == by_name.collectives(8, 8)

    same(("--kv-cache-dtype", "fp8"), "kv_cache_dtype=fp8")
    same(("--tensor", "2"), "tensor=2")
    half, full = limits("qwen3-8b"), limits("qwen3-8b", "--engine", "dtype=float32")
    assert full.prefill(1) == 2 * half.prefill(1)
    assert full.token_bytes == 2 * half.token_bytes
