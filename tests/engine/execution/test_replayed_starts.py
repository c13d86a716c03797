# SPDX-License-Identifier: Apache-2.0
"""Requests may start in a step without prefill, while an image is encoded; decode graphs run such steps."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from mizzen.core.sampling_params import SamplingParams
from mizzen.core.step_plan import PageWrites, PrefillChunk, SlotOptions, SlotStart, StepPlan
from mizzen.engine.execution.runner import CudaRunner
from mizzen.engine.execution.step import StepExecutor
from mizzen.engine.prompt_outputs import PromptOutputs

SLOT = 3


class ReplayedPlans(list[StepPlan]):
    """Decode graphs that only keep the plans."""

    def can_run(self, plan: StepPlan) -> bool:
        return not plan.prefill

    def __call__(self, plan: StepPlan) -> None:
        self.append(plan)


def start(options: SlotOptions | None) -> SlotStart:
    return SlotStart(slot=SLOT, length=0, sampling=SamplingParams(temperature=0), seed=0, options=options)


def make_plan(*, starts: tuple[SlotStart, ...] = (), prefill: tuple[PrefillChunk, ...] = ()) -> StepPlan:
    return StepPlan(
        step=1,
        decode=np.array([1], np.int32),
        decode_version=1,
        pages=PageWrites(),
        starts=starts,
        prefill=prefill,
    )


def test_a_replay_forgets_the_options_of_the_request_that_had_the_slot() -> None:
    """Else the prompt of the new request would be scored as that of the old one."""
    model: Any = SimpleNamespace()
    executor: Any = SimpleNamespace(prompt_outputs=PromptOutputs(model, model))
    executor.prepare_replay = partial(StepExecutor.prepare_replay, executor)
    graphs = ReplayedPlans()
    runner: Any = SimpleNamespace(step=executor, decode_graphs=graphs)
    prompt = np.arange(5, 15, dtype=np.int32)
    scored = SlotOptions(tokens=prompt, prompt_tokens=10, prompt_logprobs=0)
    chunk = PrefillChunk(slot=SLOT, start=0, tokens=prompt, last=True)
    executor.prompt_outputs.start_slots((start(scored),))
    assert executor.prompt_outputs.chunks_to_read(make_plan(prefill=(chunk,)))
    CudaRunner.run(runner, make_plan(starts=(start(None),)))
    assert len(graphs) == 1
    assert not executor.prompt_outputs.chunks_to_read(make_plan(prefill=(chunk,)))
