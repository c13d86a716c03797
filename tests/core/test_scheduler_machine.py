# SPDX-License-Identifier: Apache-2.0
"""Checks the scheduler's properties under random events, and that these checks detect seeded defects."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import SchedulerMachine
from mutants.defects import MUTANTS

COMMON = settings(stateful_step_count=30, suppress_health_check=list(HealthCheck), database=None)


def test_scheduler_keeps_its_properties() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=settings(COMMON, max_examples=120))


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_scheduler_machine_detects_each_mutant(name: str) -> None:
    machine = type(f"{name}_machine", (SchedulerMachine,), {"make": staticmethod(MUTANTS[name])})
    with pytest.raises(Exception):  # noqa: B017 a defect may show as any error
        run_state_machine_as_test(
            machine,
            settings=settings(COMMON, max_examples=600, phases=[Phase.generate], derandomize=True),
        )
