"""How much memory the largest step takes, measured: KV gets what that leaves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from mizzen.core.sampling_params import MAX_LOGPROBS, PARAMETERS, SamplingParams
from mizzen.core.step_plan import PageWrites, PrefillChunk, SlotOptions, SlotStart, StepPlan, no_ints
from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.step import StepExecutor
from mizzen.engine.sampling.sampler import PARTIAL_SORT_LIMIT

GREEDIEST = SamplingParams(
    **{
        **{parameter.name: parameter.profiled for parameter in PARAMETERS},
        "top_k": PARTIAL_SORT_LIMIT + 1,  # without a kernel for it the whole vocabulary is put in order
    }
)
"""Asks for all that takes memory in a step, beside the log probabilities of prompts."""


def largest_plan(options: EngineOptions, context: int) -> StepPlan:
    """Return a step with as many tokens and samples as any: prompts in all slots, of the same length.

    Slot s begins at page s * n, where n is the number of pages of each.
    """
    slots = options.max_running_requests
    size = min(-(-(options.prefill_chunk_tokens + slots) // slots), context - 1)
    columns = -(-size // options.page_size)
    tokens = np.zeros(size, np.int32)
    # Log probabilities of prompts are made one after the other, so that one need ask for the most probable.
    first, other = (
        SlotOptions(tokens=tokens, prompt_tokens=size, prompt_logprobs=top) for top in (MAX_LOGPROBS, 0)
    )
    starts = [
        SlotStart(slot=slot, length=0, sampling=GREEDIEST, seed=slot, options=other if slot else first)
        for slot in range(slots)
    ]
    pages = PageWrites(
        np.repeat(np.arange(slots, dtype=np.int32), columns),
        np.tile(np.arange(columns, dtype=np.int32), slots),
        np.arange(slots * columns, dtype=np.int32),
    )
    return StepPlan(
        step=-4,
        decode=no_ints(),
        decode_version=-4,
        pages=pages,
        starts=tuple(starts),
        prefill=tuple(PrefillChunk(slot=s, start=0, tokens=tokens, last=True) for s in range(slots)),
    )


def measured_bytes(
    make_step: Callable[[int], StepExecutor], plan: StepPlan, page_bytes: int, device: torch.device
) -> int:
    """Return what a step takes on a GPU besides weights and KV: slots, workspaces and intermediate results.

    Args:
        make_step: makes a step over KV of so many pages, and one of padding.
        plan: the largest step.
        page_bytes: what a page takes.
        device: the GPU.
    """
    pages = len(plan.pages.pages)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    with torch.inference_mode():
        make_step(pages)(plan)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return max(peak - before - (pages + 1) * page_bytes, 0)
