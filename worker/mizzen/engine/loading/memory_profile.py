# SPDX-License-Identifier: Apache-2.0
"""Measures the memory of the largest step on a GPU; the KV cache gets the rest of the memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from mizzen.core.sampling_params import MAX_LOGPROBS, PARAMETERS, SamplingParams
from mizzen.core.step_plan import PageWrites, PrefillChunk, SlotOptions, SlotStart, StepPlan, no_ints
from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.step import StepExecutor
from mizzen.engine.sampling.sampler import PARTIAL_SORT_LIMIT

LARGEST_SAMPLING = SamplingParams(
    **{
        **{parameter.name: parameter.profiled for parameter in PARAMETERS},
        "top_k": PARTIAL_SORT_LIMIT + 1,  # sorts the whole vocabulary if no kernel supports it
    }
)
"""Sampling parameters that enable all features which need memory, except prompt log probabilities."""


def build_largest_plan(options: EngineOptions, context: int) -> StepPlan:
    """Return a plan with the maximum number of tokens and samples: a prompt of the same length in each slot.

    With n pages per slot, the pages of slot s are numbered from s * n.
    """
    slots = options.max_running_requests
    size = min(-(-(options.prefill_chunk_tokens + slots) // slots), context - 1)
    columns = -(-size // options.page_size)
    tokens = np.zeros(size, np.int32)
    # Prompts with equal numbers of top log probabilities share a table. Its logits are computed by blocks of
    # rows, beside which a few values for each row are small, so only one request has the maximum.
    first, other = (
        SlotOptions(tokens=tokens, prompt_tokens=size, prompt_logprobs=top) for top in (MAX_LOGPROBS, 0)
    )
    starts = [
        SlotStart(slot=slot, length=0, sampling=LARGEST_SAMPLING, seed=slot, options=other if slot else first)
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


def measure_step_bytes(
    make_step: Callable[[int], StepExecutor], plan: StepPlan, page_bytes: int, device: torch.device
) -> int:
    """Return the peak GPU bytes of a step besides weights and KV: slots, workspaces and activations.

    Args:
        make_step: Creates an executor; its KV cache has the given number of pages plus a scratch page.
        plan: Plan of the largest step.
        page_bytes: Bytes per KV page.
        device: The GPU.
    """
    pages = len(plan.pages.pages)
    peak = measure_peak_bytes(lambda: make_step(pages)(plan), device)
    return max(peak - (pages + 1) * page_bytes, 0)


def measure_peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Call a function, and return the most GPU bytes that PyTorch reserved meanwhile, beyond those before."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    with torch.inference_mode():
        run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return peak - before
