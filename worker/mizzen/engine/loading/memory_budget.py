# SPDX-License-Identifier: Apache-2.0
"""Memory budget: computes the number of KV pages that fit besides the weights and the largest step.

`model_setup` calls it after the weights are loaded. Errors name the option to change.
"""

from __future__ import annotations

from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.host import DeviceMemory
from mizzen.engine.loading.memory_need import MemoryNeed

GIB = 1 << 30
MAX_FREE_MEMORY_DIFFERENCE = 0.10
"""Maximum relative difference in free memory between ranks; if it is larger, no rank starts."""


class MemoryShortage(ValueError):
    """Weights, KV cache or steps do not fit into memory; the message names the cause and a remedy."""


def fit_kv_pages(options: EngineOptions, context_length: int, need: MemoryNeed, memory: DeviceMemory) -> int:
    """Return the number of KV pages to allocate; called when the weights are loaded.

    If `kv_cache_tokens` is set, it determines the number. Otherwise KV gets the share `memory_fraction` of
    the total memory, less the memory in use and that of a step. On CPU, KV gets at most the memory that the
    maximum number of running requests can fill at full length, because other processes use the same memory.

    Raises:
        MemoryShortage: `kv_cache_tokens` tokens do not fit, or there is not enough memory for two tokens.
    """
    page_bytes = options.page_size * need.token_bytes
    used = memory.total - memory.free
    kv_budget = int(memory.total * options.memory_fraction) - used - need.step_bytes
    if options.kv_cache_tokens is not None:
        pages = -(-options.kv_cache_tokens // options.page_size)
        # On CPU, KV takes memory only as it is written, and other processes use the same memory anyway.
        step = need.step_bytes if options.device == "cuda" else 0
        if pages * page_bytes + step > memory.free:
            beside = f" beside a step's {format_gib(step)}" if step else ""
            raise MemoryShortage(
                f"--kv-cache-tokens {options.kv_cache_tokens} needs "
                f"{format_gib(pages * page_bytes)}{beside}, "
                f"{format_gib(memory.free)} of {format_gib(memory.total)} are free: lower it"
            )
        return pages
    pages = kv_budget // page_bytes
    if options.device == "cpu":
        max_filled = -(-context_length // options.page_size) * options.max_running_requests
        pages = min(pages, max_filled)
    if pages * options.page_size < 2:
        raise MemoryShortage(
            f"no memory is left for KV: of {format_gib(memory.total)}, "
            f"--memory-fraction {options.memory_fraction} "
            f"allows {format_gib(int(memory.total * options.memory_fraction))}; "
            f"{format_gib(used)} are in use (weights and other processes), "
            f"a step needs {format_gib(need.step_bytes)} and a page {page_bytes} bytes. Raise "
            "--memory-fraction, lower --prefill-chunk-tokens or --max-running-requests, or free memory"
        )
    return pages


ADVICE_BY_PHASE = {
    "weights": "take a larger GPU, spread the model over several GPUs (--tensor), or free memory",
    "kv": "lower --memory-fraction or --kv-cache-tokens, or free memory",
}
"""Remedies if GPU memory runs out, by start-up phase."""
DEFAULT_ADVICE = (
    "lower --memory-fraction, --kv-cache-tokens, --cuda-graph-max-batch or --cuda-graph-max-tokens, "
    "or free memory"
)
"""Remedies if GPU memory runs out in any other phase."""


def memory_shortage(phase: str, error: BaseException) -> MemoryShortage:
    """Return the error, with a remedy, to raise after a phase failed with the out-of-memory error `error`."""
    return MemoryShortage(
        f"the GPU has too little memory ({phase}): {ADVICE_BY_PHASE.get(phase, DEFAULT_ADVICE)} ({error})"
    )


def rank_memory(memory: DeviceMemory, options: EngineOptions) -> DeviceMemory:
    """Return a rank's share of the memory of its device; on CPU, all ranks share the machine equally."""
    if options.device != "cpu" or options.tensor == 1:
        return memory
    return DeviceMemory(memory.total // options.tensor, memory.free // options.tensor)


def min_pages_over_ranks(pages: list[int], free: list[int] | None) -> int:
    """Return the number of KV pages that each rank uses: as many as fit on the rank with the least space.

    Args:
        pages: Number of pages that fit on each rank.
        free: Bytes that were free on each rank's GPU after its weights were loaded; None on CPU.

    Raises:
        MemoryShortage: Free memory differs so much that other processes must be using one of the GPUs.
    """
    if free is not None and max(free) - min(free) > MAX_FREE_MEMORY_DIFFERENCE * max(free):
        sizes = ", ".join(f"rank {rank} {format_gib(size)}" for rank, size in enumerate(free))
        raise MemoryShortage(
            f"free memory differs by more than {MAX_FREE_MEMORY_DIFFERENCE:.0%} between the GPUs "
            f"once weights are loaded "
            f"({sizes}): another process uses memory on one of them; free it, or choose other GPUs"
        )
    return min(pages)


def format_gib(size: int) -> str:
    """Format a number of bytes in GiB."""
    return f"{size / GIB:.2f} GiB"
