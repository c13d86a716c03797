# SPDX-License-Identifier: Apache-2.0
"""The overlap loop with the simulated runner: results, aborts from other threads, slow and failing steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from world import END_TOKEN, SCRIPT, request, run_alone

from mizzen.core.config import SchedulerConfig
from mizzen.core.request import Finished, FinishReason
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import PrefillChunk, StepPlan
from mizzen.engine.overlap_loop import OverlapLoop, StepFailed
from mizzen.engine.simulated.engine import (
    Script,
    StepDuration,
    echo,
    ends_after,
    fixed,
    make_simulated_runner,
)


def make_loop(
    script: Script = SCRIPT,
    delay: Callable[[StepPlan], float] | None = None,
    speed: StepDuration | None = None,
    depth: int = 2,
) -> OverlapLoop:
    config = SchedulerConfig(
        pages_total=64,
        page_size=4,
        context_length=128,
        max_running_requests=4,
        prefill_chunk_tokens=16,
        end_token_ids=(END_TOKEN,),
        steps_in_flight=depth,
    )
    runner = make_simulated_runner(
        slots=4, pages=64, page_size=4, context_length=128, script=script, delay=delay, duration=speed
    )
    return OverlapLoop(Scheduler(config), runner)


def run(loop: OverlapLoop) -> tuple[dict[int, list[int]], dict[int, Finished]]:
    output: dict[int, list[int]] = {}
    finished: dict[int, Finished] = {}
    while loop.busy:
        step = loop.step(time.monotonic())
        ends = list(loop.drain_finished())
        if step is not None:
            for rid, token in zip(step.rids.tolist(), step.tokens.tolist(), strict=True):
                output.setdefault(rid, []).append(token)
            ends += step.finished
        for end in ends:
            assert end.rid not in finished
            finished[end.rid] = end
    return output, finished


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_batched_outputs_equal_outputs_of_requests_run_alone(depth: int) -> None:
    loop = make_loop(depth=depth, delay=lambda plan: 0.002 * (plan.step % 3))
    requests = [request(rid, [4, 5, 6] * (rid + 1), max_tokens=12) for rid in range(10)]
    for submitted in requests:
        loop.submit(submitted)
    output, finished = run(loop)
    loop.close()
    for submitted in requests:
        assert (output[submitted.rid], finished[submitted.rid].reason) == run_alone(submitted, 128)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_of_a_step_are_read_while_later_steps_run(depth: int) -> None:
    gate, started_steps = threading.Event(), []

    def hold(plan: StepPlan) -> float:
        started_steps.append(plan.step)
        if plan.step == 2:
            gate.wait(timeout=30)
        return 0.0

    loop = make_loop(depth=depth, delay=hold)
    loop.submit(request(1, [4, 5], max_tokens=6, ignore_eos=True))
    first = loop.step(0.0)
    assert first is not None
    assert first.step == 1
    assert loop._inflight_steps == depth - 1
    gate.set()
    output, finished = run(loop)
    loop.close()
    assert len(output[1]) == 5
    assert finished[1].output_tokens == 6
    assert started_steps == [1, 2, 3, 4, 5, 6]


def test_scripted_replies_are_generated() -> None:
    for script, expected in (
        (echo(END_TOKEN), [4, 5, 6, END_TOKEN]),
        (fixed((9, 8), END_TOKEN), [9, 8, END_TOKEN]),
        (ends_after(fixed((9,) * 99, END_TOKEN), 4, END_TOKEN), [9, 9, 9, 9, END_TOKEN]),
    ):
        loop = make_loop(script)
        loop.submit(request(1, [4, 5, 6]))
        output, finished = run(loop)
        loop.close()
        assert output[1] == expected
        assert finished[1].reason is FinishReason.STOP
        assert finished[1].stop_token == END_TOKEN


def test_abort_from_another_thread() -> None:
    loop = make_loop(fixed((9,) * 120, END_TOKEN), speed=StepDuration(step_seconds=0.005))
    loop.submit(request(1, [4, 5, 6]))
    timer = threading.Timer(0.05, loop.abort, (1,))
    timer.start()
    output, finished = run(loop)
    timer.join()
    loop.close()
    assert finished[1].reason is FinishReason.ABORT
    assert finished[1].output_tokens == len(output[1]) < 100


def test_error_of_a_failing_step_names_the_step() -> None:
    def fail(plan: StepPlan) -> float:
        if plan.step == 3:
            raise OSError("the device fell off the bus")
        return 0.0

    loop = make_loop(delay=fail)
    loop.submit(request(1, [4], ignore_eos=True))
    with pytest.raises(StepFailed, match="step 3 failed: the device fell off the bus"):
        run(loop)
    loop.close()


def test_simulated_device_detects_an_invalid_plan() -> None:
    runner = make_simulated_runner(slots=2, pages=8, page_size=4, context_length=16, script=SCRIPT)
    chunk = PrefillChunk(slot=0, start=0, tokens=np.array([1, 2], np.int32), last=True)
    loop = make_loop()
    loop.submit(request(1, [1, 2]))
    plan = loop._scheduler.schedule(loop._drain_events(), 0.0)
    assert plan is not None
    broken = StepPlan(step=1, decode=plan.decode, decode_version=0, pages=plan.pages, prefill=(chunk,))
    runner.launch(broken)
    with pytest.raises(RuntimeError, match="a chunk of slot 0 without a start of the slot"):
        runner.collect()
    runner.close()
    loop.close()


def test_launching_more_steps_than_allowed_raises() -> None:
    loop = make_loop()
    with pytest.raises(ValueError, match=r"depth must be between 1 and steps_in_flight \(2\), not 3"):
        OverlapLoop(loop._scheduler, loop._runner, 3)
    assert not loop.busy
    assert loop.step(0.0) is None
    loop.close()
