# SPDX-License-Identifier: Apache-2.0
"""Figures and row names of the GPU benchmarks, which run in this process with a tiny shape."""

from __future__ import annotations

import sys
from typing import Any

import mixed
import offline
import prefill
import prefix
import pytest
import startup
from common_parts import gpu, mixed_step
from common_parts.engine_options import parse_checked_args
from common_parts.tables import Table
from one_model import figures
from startup import Start, label_phases


def test_a_warm_up_round_with_other_prompts_precedes_the_measured_rounds(
    measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def answer(llm: object, prompts: list[int], outputs: list[int], seed: int) -> float:
        seeds.append(seed)
        return float(len(seeds))

    monkeypatch.setattr(offline, "answer", answer)
    table, figures = measured(offline, "--batch=2", "--output=3")
    assert seeds == [2, 0, 1]
    assert figures["seconds"] == [2.0, 3.0]
    assert table.rows[0]["rounds"] == [6 / 2, 6 / 3]


def test_one_engine_gives_the_figures_of_three_benchmarks(measured: Any) -> None:
    table, results = measured(figures, "--batch=2", "--context=40", "--work=2x24", "--requests=3")
    works = ["2x24", "decode step, batch 2", "3 requests at once"]
    assert [row["work"] for row in table.rows] == works
    assert all(len(row["rounds"]) == 2 and row["figure"] > 0 for row in table.rows)
    assert results["prefill"].keys() == {"2x24"} and results["decode"].keys() == {2}
    table, _ = measured(figures, "--batch=1", "--context=40", "--parts", "decode")
    assert [row["work"] for row in table.rows] == ["decode step, batch 1"]


def test_several_hits_at_once_are_labelled_and_not_compared_with_one_miss(
    measured: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    table, figures = measured(prefix, "--context=64", "--own=8", "--batch=3")
    assert [row["work"] for row in table.rows] == ["64 + 8, miss", "3 x (64 + 8), hit"]
    assert figures["ratio"] is None and "times as fast" not in capsys.readouterr().out
    table, figures = measured(prefix, "--context=64", "--own=8")
    assert [row["work"] for row in table.rows] == ["64 + 8, miss", "64 + 8, hit"]
    assert f"a hit is {figures['ratio']:.1f} times as fast" in capsys.readouterr().out


def test_groups_report_the_cached_share_and_the_throughput_without_the_cache(measured: Any) -> None:
    table, figures = measured(prefix, "--groups=3", "--each=4", "--context=64", "--own=8")
    assert [row["work"] for row in table.rows] == ["3 x 4, cached", "3 x 4, not cached"]
    assert figures["groups"]["cached"]["hit_share"] == pytest.approx(64 / 72 * 3 / 4)
    assert figures["groups"]["not cached"]["hit_share"] == 0
    assert all(len(row["rounds"]) == 2 and row["unit"] == "tok/s" for row in table.rows)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (prefix, ("--each=4",), "--each is the number of prompts per group"),
        (prefix, ("--groups=2", "--batch=1"), "--batch has no effect with --groups"),
        (prefix, ("--no-prefix-cache",), "there is nothing to measure without the prefix cache"),
        (prefill, ("--work=1x8", "--batch=2"), "--work conflicts with --batch and --context"),
    ],
)
def test_options_without_meaning_together_are_rejected(
    measured: Any, capsys: pytest.CaptureFixture[str], module: Any, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit):
        measured(module, *options)
    assert f"error: {message}" in capsys.readouterr().err


def test_a_mixed_step_is_compared_with_its_decodes_alone(
    measured: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    table, figures = measured(mixed, "--one-step", "--batch=2", "--context=20", "--chunk-tokens", "5", "16")
    assert [row["work"] for row in table.rows] == [
        "decodes alone",
        *(f"2+{chunk}, {name}" for chunk in (5, 16) for name in ("eager", "eager and sampled")),
    ]
    assert all(row["note"].endswith(" us per prompt token") for row in table.rows[1:])
    assert set(figures["settled"]) == {"eager", "eager and sampled"}
    assert "  eager: the scheduler settles on " in capsys.readouterr().out


def test_a_simulated_budget_settles_on_the_largest_chunk_within_the_target() -> None:
    # 6 ms more than the decodes for any chunk, and 20 us for each prompt token.
    mixed_seconds = {16: 0.01632, 1016: 0.03632}
    tokens, seconds = mixed_step.simulate_budget(0.01, mixed_seconds, 25.0, 16)
    assert tokens == pytest.approx(450, abs=32) and seconds == pytest.approx(0.025, rel=0.03)
    tokens, seconds = mixed_step.simulate_budget(0.01, {500: 0.012}, 25.0, 16)
    assert tokens > 3000 and seconds == pytest.approx(0.025, rel=0.05)


def test_the_limit_of_a_mixed_step_counts_weights_once_and_the_kv_of_all_decodes() -> None:
    from common_parts.limits import Limits
    from common_parts.shapes import config_of

    limits = Limits(config=config_of("qwen3-8b"), bandwidth=4.5e12, flops=750e12)
    alone = limits.decode(256, 1024)
    operations, kv = 2 * 256 * (limits.body + limits.head), 256 * limits.kv_bytes(1024)
    assert alone == limits.mixed(256, 1024, 0) == pytest.approx(operations / 750e12 + kv / 4.5e12)
    assert limits.mixed(256, 1024, 16) < 1.06 * alone
    most = alone + 1.01 * limits.prefill(2048)
    assert limits.prefill(2048) < limits.mixed(256, 1024, 2048) < most


def test_start_up_figures_are_medians_of_the_rounds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["startup", "--device=cpu", "--shape=tiny", "--rounds=2"])
    args = parse_checked_args(gpu.benchmark_parser("start"))
    args.link = 55.0
    rounds = [Start(1.0 * n, 4.0 * n, 5.0 * n, {"config": 0.1 * n, "weights": 2.0 / n}) for n in (1, 2, 4)]
    table = Table("start")
    startup.print_rounds(args, table, 2 * 10**9, rounds[2], rounds)
    assert {row["work"]: row["figure"] for row in table.rows} == {
        "start to ready": 8.0,
        "weights": 2.0,
        "first token": 10.0,
        "Python and imports": 2.0,
        "phase config": 0.2,
        "phase weights": 1.0,
    }
    assert all(len(row["rounds"]) == 3 for row in table.rows)


def test_the_config_phase_of_several_ranks_is_labelled_as_waiting() -> None:
    assert label_phases({"config": 2.0, "kv": 1.0}, 1) == {"config": 2.0, "kv": 1.0}
    assert label_phases({"config": 2.0, "kv": 1.0}, 2) == {"config, ranks meet": 2.0, "kv": 1.0}


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (mixed, ("--max-step-milliseconds=10", "--engine", "max_step_milliseconds=50")),
        (startup, ("--context=512", "--engine", "context_length=1024")),
        (startup, ("--batch=4", "--engine", "max_running_requests=8")),
    ],
)
def test_a_contradiction_with_a_benchmarks_own_option_is_rejected(
    measured: Any, capsys: pytest.CaptureFixture[str], module: Any, options: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit):
        measured(module, *options)
    assert "a flag sets" in capsys.readouterr().err
