# SPDX-License-Identifier: Apache-2.0
"""The rates of a GPU that limits are computed from are measured, or given on the command line."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import pytest
from common_parts import limits, machine_rates
from common_parts.machine_rates import MachineRates, measure_in_child_process

RATES = MachineRates(bandwidth=3.1e12, flops=777e12)


def arguments(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    limits.add_roofline_options(parser)
    return parser.parse_args(options)


def test_rates_that_are_not_given_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(limits, "measure_in_child_process", lambda: RATES)
    args = arguments("--tflops", "500")
    limits.measure_roofline(args)
    assert limits.roofline_of(args) == pytest.approx((3.1e12, 500e12))
    assert capsys.readouterr().out == "limits: 3.10 TB/s (measured), 500 TFLOP/s (given)\n"


@pytest.mark.parametrize("options", [["--bandwidth", "3", "--tflops", "790"], ["--device", "cpu"]])
def test_nothing_is_measured_if_both_rates_are_given_or_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    def fail() -> MachineRates:
        raise AssertionError("measured")

    monkeypatch.setattr(limits, "measure_in_child_process", fail)
    limits.measure_roofline(arguments(*options))


def test_a_failed_measurement_ends_the_benchmark_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> MachineRates:
        raise RuntimeError("the rates of the GPU cannot be measured: out of memory")

    monkeypatch.setattr(limits, "measure_in_child_process", fail)
    with pytest.raises(SystemExit, match=r"error: .*: out of memory; give --bandwidth and --tflops"):
        limits.measure_roofline(arguments())


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no memory')", "cannot be measured: no memory"),
        ("import time; time.sleep(60)", "not measured within 1 s"),
    ],
)
def test_a_child_that_fails_or_hangs_is_an_error(
    monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    run = machine_rates.subprocess.run

    def run_program(command: list[str], **options: Any) -> Any:
        return run([sys.executable, "-c", program], **options)

    monkeypatch.setattr(machine_rates, "TIMEOUT", 1.0)
    monkeypatch.setattr(machine_rates.subprocess, "run", run_program)
    with pytest.raises(RuntimeError, match=message):
        measure_in_child_process()


def test_the_child_reports_its_rates_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    run = machine_rates.subprocess.run
    program = f"print({json.dumps(json.dumps({'bandwidth': 3.1e12, 'flops': 777e12}))})"

    def run_program(command: list[str], **options: Any) -> Any:
        assert command[1:] == ["-m", "common_parts.machine_rates"]
        return run([sys.executable, "-c", program], **options)

    monkeypatch.setattr(machine_rates.subprocess, "run", run_program)
    assert measure_in_child_process() == RATES
