# SPDX-License-Identifier: Apache-2.0
"""The prefill budget shortens prompt chunks to keep steps with decodes within `max_step_milliseconds`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import pytest
from timeline import Seconds, Timeline, prompt_tokens
from world import request

from mizzen.core.config import SchedulerConfig
from mizzen.core.prefill_budget import PrefillBudget
from mizzen.core.request import Request
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import StepPlan
from mizzen.engine.overlap_loop import OverlapLoop
from mizzen.engine.simulated.engine import StepDuration, fixed, make_simulated_runner

LONG = 8192
CONFIG = SchedulerConfig(
    pages_total=4096,
    page_size=16,
    context_length=16384,
    max_running_requests=8,
    prefill_chunk_tokens=LONG,
    max_step_milliseconds=20.0,
)


def stream(tokens: int, rid: int = 1) -> Request:
    return request(rid, [2] * 64, max_tokens=tokens, ignore_eos=True)


def long_prompts(count: int, at: float, interval: float) -> list[tuple[float, Request]]:
    return [
        (at + interval * number, request(100 + number, [3 + number] * LONG, max_tokens=2, ignore_eos=True))
        for number in range(count)
    ]


def simulate(seconds: Seconds, config: SchedulerConfig = CONFIG, tokens: int = 400) -> Timeline:
    """Run one stream of `tokens` tokens, during which three long prompts arrive.

    Args:
        seconds: function that returns how many virtual seconds the device takes for a plan.
        config: options of the scheduler.
        tokens: tokens that the stream generates.
    """
    timeline = Timeline(config, seconds)
    timeline.run([(0.0, stream(tokens)), *long_prompts(3, at=0.5, interval=0.3)])
    return timeline


def prompt_tokens_of_mixed_steps(timeline: Timeline) -> list[int]:
    """Return the number of prompt tokens of each step that contains both decodes and prefill."""
    return [prompt_tokens(plan) for _, plan in timeline.plans if len(plan.decode) and plan.prefill]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_time_between_tokens_stays_near_the_limit_while_long_prompts_arrive(depth: int) -> None:
    speed = StepDuration(step_seconds=0.004, seconds_per_prefill_token=50e-6)
    timeline = simulate(speed.plan_seconds, dataclasses.replace(CONFIG, steps_in_flight=depth))
    assert timeline.longest_gap(1) <= 0.021
    work = 3 * LONG * 50e-6
    first = timeline.tokens_at[102][0] - 0.5
    assert first <= work / 0.7, "prompts get what the limit leaves: 16 of 20 milliseconds"


def test_without_a_limit_a_long_prompt_delays_decodes() -> None:
    unbounded = dataclasses.replace(CONFIG, max_step_milliseconds=None)
    timeline = simulate(
        StepDuration(step_seconds=0.004, seconds_per_prefill_token=50e-6).plan_seconds, unbounded
    )
    assert timeline.longest_gap(1) >= LONG * 50e-6


def test_prefill_uses_full_chunks_when_nothing_decodes() -> None:
    timeline = Timeline(
        CONFIG, StepDuration(step_seconds=0.004, seconds_per_prefill_token=50e-6).plan_seconds
    )
    timeline.run([(0.0, stream(30)), *long_prompts(2, at=2.0, interval=5.0)])
    alone = [prompt_tokens(plan) for _, plan in timeline.plans if plan.prefill and not len(plan.decode)]
    assert alone == [64, LONG, LONG]


def test_prefill_progresses_when_decode_only_steps_exceed_the_limit() -> None:
    timeline = simulate(StepDuration(step_seconds=0.05, seconds_per_prefill_token=100e-6).plan_seconds)
    assert timeline.longest_gap(1) <= 0.05 * 1.26
    assert min(prompt_tokens_of_mixed_steps(timeline)) >= 16
    assert len(timeline.tokens_at[102]) == 2


def test_budget_adapts_when_prompt_tokens_become_expensive() -> None:
    """The first 256 prompt tokens of a step cost no time, as on a GPU whose decode steps are memory-bound."""

    def seconds(plan: StepPlan) -> float:
        return 0.01 + 50e-6 * max(prompt_tokens(plan) - 256, 0)

    timeline = Timeline(CONFIG, seconds)
    short = [(0.1 * n, request(10 + n, [9, n] * 40, max_tokens=1)) for n in range(1, 30)]
    timeline.run([(0.0, stream(600)), *short, *long_prompts(2, at=3.5, interval=0.1)])
    assert timeline.longest_gap(1) <= 0.04
    assert max(prompt_tokens_of_mixed_steps(timeline)) > 350


def test_budget_settles_when_small_chunks_are_less_efficient() -> None:
    def seconds(plan: StepPlan) -> float:
        return 0.004 + (0.006 + 25e-6 * prompt_tokens(plan) if plan.prefill else 0.0)

    timeline = simulate(seconds)
    assert timeline.longest_gap(1) <= 0.024
    assert np.median(prompt_tokens_of_mixed_steps(timeline)) == pytest.approx(400, rel=0.1)


def test_one_slow_step_does_not_change_the_budget() -> None:
    prefill_budget = PrefillBudget(CONFIG)
    now = 0.0

    def complete_step(seconds: float, tokens: int) -> None:
        nonlocal now
        started, now = now, now + seconds
        prefill_budget.record_step(started, now, tokens, decodes=True)

    for _ in range(20):
        complete_step(0.004, 0)
        complete_step(0.014, 200)
    budget_before = prefill_budget.tokens(decodes=True)
    complete_step(3.0, 0)
    assert prefill_budget.tokens(decodes=True) == budget_before
    complete_step(0.004, 0)
    complete_step(5.0, 200)
    assert prefill_budget.tokens(decodes=True) == pytest.approx(budget_before, rel=0.05)


def test_budget_drops_at_once_when_the_device_slows_down() -> None:
    slow_from = 1.0
    timeline: Timeline

    def seconds(plan: StepPlan) -> float:
        factor = 4.0 if timeline.now >= slow_from else 1.0
        return 0.002 + 25e-6 * factor * prompt_tokens(plan)

    timeline = Timeline(CONFIG, seconds)
    timeline.run([(0.0, stream(400)), *long_prompts(4, at=0.5, interval=0.0)])
    slow_steps = [
        seconds_taken
        for seconds_taken, plan in timeline.plans
        if len(plan.decode) and plan.prefill and seconds_taken > 0.022
    ]
    assert 1 <= len(slow_steps) <= 6
    assert timeline.longest_gap(1) <= 0.08


def later_mixed_steps(decode: Callable[[float], float]) -> list[tuple[float, StepPlan]]:
    """Run a stream under a constant load of prompts; return the later half of its mixed steps.

    A mixed step contains both decodes and prefill. Each step is returned with its duration in seconds.
    `decode` returns the seconds that a step's decodes take at a given time.
    """
    timeline: Timeline

    def seconds(plan: StepPlan) -> float:
        return decode(timeline.now) + 30e-6 * prompt_tokens(plan)

    timeline = Timeline(CONFIG, seconds)
    timeline.run([(0.0, stream(500)), *long_prompts(40, at=0.5, interval=0.2)])
    mixed = [step for step in timeline.plans if len(step[1].decode) and step[1].prefill]
    return mixed[len(mixed) // 2 :]


@pytest.mark.parametrize("first_decode_seconds", [0.005, 0.1])
def test_prefill_keeps_its_minimum_share_when_decodes_slow_down_under_constant_prefill(
    first_decode_seconds: float,
) -> None:
    later_steps = later_mixed_steps(lambda now: first_decode_seconds if now < 0.7 else 0.036)
    assert np.median([prompt_tokens(plan) for _, plan in later_steps]) > 0.2 * 0.036 / 30e-6
    assert max(seconds_taken for seconds_taken, _ in later_steps) <= 0.036 * 1.26


def test_step_limit_holds_after_decodes_speed_up_under_constant_prefill() -> None:
    later_steps = later_mixed_steps(lambda now: 0.036 if now < 0.9 else 0.005)
    assert max(seconds_taken for seconds_taken, _ in later_steps) <= 0.021
    assert np.median([prompt_tokens(plan) for _, plan in later_steps]) > 400


def test_decode_only_probe_steps_cost_prefill_little_on_a_slow_device() -> None:
    timeline = Timeline(CONFIG, StepDuration(step_seconds=0.08, seconds_per_prefill_token=2e-3).plan_seconds)
    timeline.run([(0.0, stream(1500)), *long_prompts(3, at=0.5, interval=0.1)])
    begin = next(at for at, (_, plan) in enumerate(timeline.plans) if plan.prefill and len(plan.decode))
    without = [plan for _, plan in timeline.plans[begin : begin + 1200] if not plan.prefill]
    assert 4 <= len(without) <= 60


def test_budget_is_a_positive_multiple_of_the_page_size() -> None:
    for page_size, chunk in ((16, 8192), (64, 8192), (64, 40), (1, 8)):
        prefill_budget = PrefillBudget(
            dataclasses.replace(CONFIG, page_size=page_size, prefill_chunk_tokens=chunk)
        )
        for seconds in (1e-6, 1e-3, 0.019, 0.5, 30.0):
            prefill_budget.record_step(0.0, 0.0, 0, decodes=True)
            for number in range(8):
                prefill_budget.record_step(
                    100.0 * number, 100.0 * number + seconds, number % 2 * 50, decodes=True
                )
            budget = prefill_budget.tokens(decodes=True)
            assert budget == chunk or (budget % page_size == 0 and budget >= 16)
            assert prefill_budget.tokens(decodes=False) == chunk


def test_equal_step_times_give_equal_plans() -> None:
    def plans() -> list[tuple[int, int]]:
        timeline = simulate(
            StepDuration(
                step_seconds=0.004, seconds_per_prefill_token=50e-6, seconds_per_decode=1e-4
            ).plan_seconds,
            tokens=200,
        )
        return [(len(plan.decode), prompt_tokens(plan)) for _, plan in timeline.plans]

    assert plans() == plans()


def test_overlap_loop_records_step_completion_times() -> None:
    """A long prompt delays a stream by less than 1.6 s of real time if the time of a step is limited.

    Without a limit, the prompt delays the stream by more than 3.2 s, which is the time that it takes alone.
    """

    def longest_gap(limit: float | None) -> float:
        config = dataclasses.replace(CONFIG, max_step_milliseconds=limit)
        runner = make_simulated_runner(
            slots=config.max_running_requests,
            pages=config.pages_total,
            page_size=config.page_size,
            context_length=config.capacity_tokens,
            script=fixed((9,) * 500, 9),
            duration=StepDuration(step_seconds=0.005, seconds_per_prefill_token=400e-6),
        )
        loop = OverlapLoop(Scheduler(config), runner)
        loop.submit(stream(90))
        times: list[float] = []
        while loop.busy:
            output = loop.step(time.monotonic())
            if output is not None and 1 in output.rids:
                times.append(time.monotonic())
            if len(times) == 10:
                loop.submit(request(2, [5] * LONG, max_tokens=1, ignore_eos=True))
        loop.close()
        return float(np.diff(times).max())

    assert longest_gap(20.0) < 1.6 < 3.2 < longest_gap(None)
