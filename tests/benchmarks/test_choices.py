# SPDX-License-Identifier: Apache-2.0
"""Options of the GPU benchmarks: accepted values, precedence, and the variants measured with them."""

from __future__ import annotations

import argparse
import json
import math
import sys

import pytest
from common_parts.arguments import above_zero, given_options, jsonable, natural, positive
from common_parts.engine_options import (
    VARIANTS,
    engine_option,
    engine_options,
    parse_checked_args,
    variants_already_off,
    with_variant,
)
from common_parts.gpu import benchmark_parser, title, variants
from common_parts.rank_logs import filter_line
from common_parts.tables import Table


def args_of(monkeypatch: pytest.MonkeyPatch, *options: str, **small: object) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["benchmark", *options])
    return parse_checked_args(benchmark_parser("options"), **small)


def test_engine_options_are_parsed_by_type() -> None:
    assert engine_option("kv-cache-tokens=12") == ("kv_cache_tokens", 12)
    assert engine_option("memory_fraction=0.5") == ("memory_fraction", 0.5)
    assert engine_option("check_integrity=true") == ("check_integrity", True)
    assert engine_option("check_integrity=false") == ("check_integrity", False)
    assert engine_option("policy=lpm") == ("policy", "lpm")
    assert engine_option("max_step_milliseconds=inf") == ("max_step_milliseconds", math.inf)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=9", "'speed=9' is not NAME=VALUE"),
        ("page_size=", "is not NAME=VALUE"),
        ("page_size=abc", "page_size must be an integer from 1 to 256"),
        ("page_size=0", "page_size must be an integer from 1 to 256"),
        ("memory_fraction=nan", "memory_fraction must be a number from 0.05 to 0.99"),
        ("check_integrity=yes", "check_integrity must be true or false"),
        ("check_integrity=True", "check_integrity must be true or false"),
        ("policy=best", "policy must be one of fcfs, lpm"),
        ("device=cpu", "use --device instead"),
        ("model=x", "use --shape instead"),
    ],
)
def test_invalid_engine_options_are_rejected_by_name(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        engine_option(text)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [(positive, ["1", "7"], ["0", "-5", "x", "1.5"]), (natural, ["0"], ["-1"]),
     (above_zero, ["0.1"], ["0", "-1", "nan", "inf", "x"])],
)  # fmt: skip
def test_invalid_numbers_are_rejected_by_value(kind: type, good: list[str], bad: list[str]) -> None:
    assert [float(kind(text)) for text in good] == [float(text) for text in good]
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}'"):
            kind(text)


def test_an_engine_option_overrides_the_default_of_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    args = args_of(monkeypatch, "--engine", "tensor=2", "steps_in_flight=4", "max_running_requests=7")
    options = engine_options(args, max_running_requests=64, load_format="dummy")
    assert (options["tensor"], options["steps_in_flight"], options["max_running_requests"]) == (2, 4, 7)
    assert title(args, "all on") == "qwen3-0.6b, 2 GPUs"


def test_a_flag_that_contradicts_an_engine_option_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        args_of(monkeypatch, "--no-graphs", "--engine", "cuda_graph=auto")
    assert "--engine cuda_graph=auto: a flag sets off: leave one of them out" in capsys.readouterr().err
    assert args_of(monkeypatch, "--no-graphs", "--engine", "cuda_graph=off").no_graphs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--no-overlap", "--depth", "4"), "--no-overlap is --depth 1, not 4: leave one of them out"),
        (("--depth", "2", "--engine", "steps_in_flight=4"), "--engine steps_in_flight=4: a flag sets 2"),
        (("--engine", "page_size=8", "page_size=16"), "--engine page_size is given 2 times"),
        (("--engine", "page_size=8", "--engine", "page_size=8"), "--engine page_size is given 2 times"),
        (("--most", "25", "--engine", "max_step_milliseconds=50"), "a flag sets 25.0: leave one of them out"),
    ],
)
def test_contradicting_options_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    def read(*options: str) -> argparse.Namespace:
        monkeypatch.setattr(sys, "argv", ["benchmark", *options])
        parser = benchmark_parser("options")
        parser.add_argument("--most", type=float, default=25.0)
        return parse_checked_args(parser, {"most": "max_step_milliseconds"})

    with pytest.raises(SystemExit):
        read(*options)
    assert message in capsys.readouterr().err


def test_options_that_agree_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    args = args_of(monkeypatch, "--no-overlap", "--depth", "1", "--engine", "steps_in_flight=1")
    assert engine_options(args)["steps_in_flight"] == 1
    args = args_of(monkeypatch, "--engine", "page_size=8", "--engine", "tensor=2")
    assert args.engine == [("page_size", 8), ("tensor", 2)]


def test_given_options_are_distinguished_from_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--depth", "2", "--engine", "page_size=8"])
    parser = benchmark_parser("options")
    assert given_options(parser) == {"depth", "engine"}
    args = parser.parse_args()
    assert (args.rounds, args.engine, args.no_graphs) == (3, [("page_size", 8)], False)


def test_a_variant_overrides_engine_options(monkeypatch: pytest.MonkeyPatch) -> None:
    args = args_of(monkeypatch, "--ablate", "--engine", "steps_in_flight=4", "cuda_graph=auto", "fusion=auto")
    assert variants(args, {}) == list(VARIANTS)
    for name in VARIANTS:
        options = engine_options(with_variant(args, name))
        assert options.items() >= VARIANTS[name].items()
        assert options["steps_in_flight"] == (1 if name == "overlap off" else 4)


def test_variants_without_effect_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    args = args_of(monkeypatch, "--ablate", "--engine", "cuda_graph=off")
    assert variants_already_off(args) == ["graphs off"]
    assert variants(args, {"prefix cache off": "needed"}) == ["all on", "overlap off", "fusion off"]
    assert title(args, "fusion off") == "qwen3-0.6b, fusion off (off throughout: graphs)"
    args = args_of(monkeypatch, "--ablate", "--device", "cpu")
    assert variants(args, {}) == ["all on", "overlap off", "prefix cache off"]


def test_small_defaults_apply_to_smoke_runs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    smoke = ("--device", "cpu", "--shape", "tiny")
    assert args_of(monkeypatch, *smoke, rounds=1).rounds == 1
    assert args_of(monkeypatch, *smoke, "--rounds", "5", rounds=1).rounds == 5
    assert args_of(monkeypatch, "--shape", "tiny", rounds=1).rounds == 3
    assert engine_options(args_of(monkeypatch, *smoke))["threads"] == 1
    assert engine_options(args_of(monkeypatch, *smoke, "--engine", "threads=2"))["threads"] == 2
    assert "threads" not in engine_options(args_of(monkeypatch))


def test_an_unknown_limit_has_no_share(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("work")
    assert not table.rows
    assert table.row("known", 4.0, 1.0, "ms") == 0.25
    assert table.row("rate", 4.0, 8.0, "tok/s") == 0.5
    assert table.row("unknown", 4.0, math.nan, "ms") is None
    assert capsys.readouterr().out.splitlines()[-1].split() == ["unknown", "4.00", "ms", "-", "-"]


def test_results_become_strict_json() -> None:
    output = jsonable({1: [math.inf, 2.0, (math.nan,)], "a": "x", "b": None})
    assert json.loads(json.dumps(output, allow_nan=False)) == {"1": [None, 2.0, [None]], "a": "x", "b": None}


def test_only_warnings_and_errors_of_ranks_are_shown() -> None:
    def line(**fields: str) -> str:
        return json.dumps(fields) + "\n"

    assert filter_line(line(level="info", event="loaded")) is None
    warning = line(level="warning", event="slow")
    assert filter_line(warning) == warning
    for text in ("Fatal Python error\n", "[1, 2]\n", "{half\n"):
        assert filter_line(text) == text
    wrong = filter_line(line(level="error", reason="no", traceback="Traceback\n  x\nValueError: no"))
    assert wrong is not None and json.loads(wrong) == {"level": "error", "reason": "no"}
    broken = line(level="error", traceback="Traceback\nRuntimeError: no")
    assert filter_line(broken) == broken
