# SPDX-License-Identifier: Apache-2.0
"""The command line and the table of benchmarks/scheduler_step.py."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import scheduler_step
from scheduler_step import COLUMNS, of_goal, quantile


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sizes", "0"), "argument --sizes: '0' is not an integer of at least 1"),
        (("--sizes", "4", "-1"), "argument --sizes: '-1' is not an integer of at least 1"),
        (("--steps", "0"), "argument --steps: '0' is not an integer of at least 1"),
        (("--steps", "1", "--sizes", "4"), "--steps 1: 4 running requests need at least 44"),
        (("--steps", "300"), "--steps 300: 512 running requests need at least 552"),
    ],
)
def test_sizes_and_steps_that_cannot_be_measured_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["scheduler_step.py", *options])
    with pytest.raises(SystemExit) as caught:
        scheduler_step.main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("running", [1, 200])
def test_the_minimum_number_of_steps_is_sufficient(running: int) -> None:
    figures = scheduler_step.measure(running, 16, scheduler_step.LEAST_STEPS + running, "fcfs", "lru")
    assert figures["quiet"] > 0 and figures["all_p99"] > 0


def test_shares_of_the_goal_are_below_the_columns_with_a_goal() -> None:
    line = of_goal(dict.fromkeys(COLUMNS, 20.0))
    cells = [line[8 + 12 * at :][:12].strip() for at in range(len(COLUMNS))]
    assert dict(zip(COLUMNS, cells, strict=True)) == dict.fromkeys(COLUMNS, "") | {
        "quiet": "50%",
        "decode": "50%",
    }


def test_a_quantile_without_values_is_nan() -> None:
    assert math.isnan(quantile(np.array([]), 99))
    assert quantile(np.array([1.0, 3.0]), 50) == 2
