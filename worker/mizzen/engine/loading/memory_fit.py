# SPDX-License-Identifier: Apache-2.0
"""Fits the KV cache into the memory that weights, images and the largest step leave on every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.step import StepExecutor
from mizzen.engine.loading.host import device_memory
from mizzen.engine.loading.memory_budget import (
    MemoryShortage,
    fit_kv_pages,
    min_pages_over_ranks,
    rank_memory,
)
from mizzen.engine.loading.memory_need import MemoryNeed
from mizzen.engine.loading.memory_profile import build_largest_plan, measure_step_bytes
from mizzen.parallel.process_group import RankGroup


def measure_need(
    options: EngineOptions,
    context: int,
    need: MemoryNeed,
    device: torch.device,
    group: RankGroup | None,
    make_step: Callable[[int], StepExecutor],
) -> MemoryNeed:
    """Return `need` with measured bytes of the largest step, to which the bytes of graphs are added.

    With a single rank on a GPU, the step is measured with a temporary KV cache. On CPU or with several
    ranks, the estimate in `need` is kept. The memory of graphs is always an estimate.

    Args:
        options: Engine options.
        context: Maximum number of prompt plus output tokens of a request.
        need: Estimated need.
        device: Device of this rank.
        group: Process group of the ranks; None for a single rank.
        make_step: Creates an executor with a KV cache of the given number of pages.

    Raises:
        MemoryShortage: The largest step does not fit besides the weights.
    """
    if device.type != "cuda" or group is not None:
        return need.with_measured_step(need.step_bytes)
    page_bytes = options.page_size * need.token_bytes
    try:
        step_bytes = measure_step_bytes(make_step, build_largest_plan(options, context), page_bytes, device)
    except torch.cuda.OutOfMemoryError as error:
        raise MemoryShortage(
            f"the largest step of {options.prefill_chunk_tokens} prompt tokens and "
            f"{options.max_running_requests} requests does not fit into memory besides the weights: lower "
            f"--prefill-chunk-tokens or --max-running-requests ({error})"
        ) from error
    return need.with_measured_step(step_bytes)


def fit_pages_on_ranks(
    options: EngineOptions,
    context: int,
    need: MemoryNeed,
    device: torch.device,
    group: RankGroup | None,
    own_bytes: int = 0,
) -> int:
    """Return the number of KV pages that fit on every rank; a collective call if there are several ranks.

    Args:
        options: Engine options.
        context: Maximum number of prompt plus output tokens of a request.
        need: Need of this rank.
        device: Device of this rank.
        group: Process group of the ranks; None for a single rank.
        own_bytes: Bytes of weights that only this rank holds.

    Raises:
        MemoryShortage: No page fits, or the free memory of the ranks differs too much.
    """
    if group is None:
        return fit_kv_pages(options, context, need, device_memory(device))
    group.barrier("weights")  # all ranks have loaded their weights
    memory = rank_memory(device_memory(device), options)
    pages = fit_kv_pages(options, context, need, memory)
    words = [word.split() for word in group.exchange("pages", f"{pages} {memory.free + own_bytes}")]
    free = [int(word[1]) for word in words] if device.type == "cuda" else None
    return min_pages_over_ranks([int(word[0]) for word in words], free)
