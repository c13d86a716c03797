"""How many KV pages fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.prefill_graphs import MAX_GRAPH_TOKENS
from mizzen.engine.loading.host import DeviceMemory
from mizzen.models.config import ModelConfig

GIB = 1 << 30
FREE_SPREAD = 0.10
"""Ranks whose free memory differs by more than this share do not start."""


class MemoryShortage(ValueError):
    """Weights, KV or steps do not fit; the message says what takes the memory and what changes that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvNeed:
    """What KV and a step's intermediate results take."""

    token_bytes: int
    """KV of one token in all layers."""
    step_bytes: int
    """Intermediate results of the largest step, and what slots may come to hold."""
    graph_bytes: int = 0
    """Intermediate results that captured steps keep for themselves."""

    @classmethod
    def of(
        cls, config: ModelConfig, options: EngineOptions, element: int, kv_element: int | None = None
    ) -> KvNeed:
        """Estimate a rank's need from the model's shape and the bytes of a number, `kv_element` in the cache.

        The feed-forward block holds the most at a time: the residual stream, its input, gate and up, and
        their product. Sampling by top p without a kernel puts a row's logits in order, with their places, and
        sums them in 64 bits: about ten times the row in 32 bits. Penalties count each token once for each
        slot. Several ranks also hold the logits as they come from each.
        """
        ranks = options.tensor
        kv_heads = max(1, config.kv_heads // ranks)
        width = 3 * config.hidden_size + 4 * config.intermediate_size // ranks
        heads = (3 * config.heads // ranks + 2 * kv_heads) * config.head_dim
        tokens = options.prefill_chunk_tokens + options.max_running_requests
        logits = options.max_running_requests * config.vocab_size * (44 + element * (ranks > 1))
        rows, captured = captured_rows(options), captured_tokens(options)
        return cls(
            token_bytes=2 * config.layers * kv_heads * config.head_dim * (kv_element or element),
            step_bytes=tokens * (width + heads) * element + logits,
            graph_bytes=captured * (width + heads) * element + rows * config.vocab_size * (element + 4),
        )

    def taking(self, taken: int) -> KvNeed:
        """Return the need of steps that were measured to take so many bytes without graphs."""
        return replace(self, step_bytes=taken + self.graph_bytes)


def captured_rows(options: EngineOptions) -> int:
    """Return the most rows of a captured step of decodes."""
    if options.device != "cuda" or options.cuda_graph == "off":
        return 0
    return min(options.cuda_graph_max_batch, options.max_running_requests)


def captured_tokens(options: EngineOptions) -> int:
    """Return the most tokens of a captured step; all share one pool of memory."""
    rows = captured_rows(options)
    prompts = MAX_GRAPH_TOKENS if options.cuda_graph_max_tokens is None else options.cuda_graph_max_tokens
    return max(rows, min(prompts, options.prefill_chunk_tokens + rows)) if rows else 0


def count_pages(options: EngineOptions, context_length: int, need: KvNeed, memory: DeviceMemory) -> int:
    """Return the number of KV pages, with the weights loaded already.

    `kv_cache_tokens` decides where it is given. Otherwise KV takes what `memory_fraction` leaves; on cpu,
    where others use the same memory, not more than all running requests at full length could fill.

    Raises:
        MemoryShortage: not even one page (of two tokens at least) fits.
    """
    page_bytes = options.page_size * need.token_bytes
    used = memory.total - memory.free
    room = int(memory.total * options.memory_fraction) - used - need.step_bytes
    if options.kv_cache_tokens is not None:
        pages = -(-options.kv_cache_tokens // options.page_size)
        # On cpu memory is taken as it is filled, and nothing keeps others from it anyway.
        step = need.step_bytes if options.device == "cuda" else 0
        if pages * page_bytes + step > memory.free:
            beside = f" beside a step's {gib(step)}" if step else ""
            raise MemoryShortage(
                f"--kv-cache-tokens {options.kv_cache_tokens} needs {gib(pages * page_bytes)}{beside}, "
                f"{gib(memory.free)} of {gib(memory.total)} are free: lower it"
            )
        return pages
    pages = room // page_bytes
    if options.device == "cpu":
        filled = -(-context_length // options.page_size) * options.max_running_requests
        pages = min(pages, filled)
    if pages * options.page_size < 2:
        raise MemoryShortage(
            f"no memory is left for KV: of {gib(memory.total)}, --memory-fraction {options.memory_fraction} "
            f"allows {gib(int(memory.total * options.memory_fraction))}; {gib(used)} are in use (weights and "
            f"other processes), a step needs {gib(need.step_bytes)} and a page {page_bytes} bytes. Raise "
            "--memory-fraction, lower --prefill-chunk-tokens or --max-running-requests, or free memory"
        )
    return pages


ADVICE = {
    "weights": "take a larger GPU, spread the model over several (--tensor), or free memory",
    "kv": "lower --memory-fraction or --kv-cache-tokens, or free memory",
}
"""What helps against a lack of memory, by phase of the start."""
LATER_ADVICE = (
    "lower --memory-fraction, --kv-cache-tokens, --cuda-graph-max-batch or --cuda-graph-max-tokens, "
    "or free memory"
)


def shortage(phase: str, error: BaseException) -> MemoryShortage:
    """Say what helps where a GPU's memory did not suffice in a phase of the start."""
    return MemoryShortage(
        f"the GPU has too little memory ({phase}): {ADVICE.get(phase, LATER_ADVICE)} ({error})"
    )


def share_memory(memory: DeviceMemory, options: EngineOptions) -> DeviceMemory:
    """Return the part of a device's memory that is a rank's: on cpu the ranks of a pod share the machine."""
    if options.device != "cpu" or options.tensor == 1:
        return memory
    return DeviceMemory(memory.total // options.tensor, memory.free // options.tensor)


def agreed_pages(pages: list[int], free: list[int] | None) -> int:
    """Return how many pages every rank has, from what each found, by rank.

    Args:
        pages: That fit.
        free: Bytes that were free on each rank's GPU when its weights were loaded; None on cpu.

    Raises:
        MemoryShortage: the GPUs differ so much in free memory that something else must be running on one.
    """
    if free is not None and max(free) - min(free) > FREE_SPREAD * max(free):
        told = ", ".join(f"rank {rank} {gib(size)}" for rank, size in enumerate(free))
        raise MemoryShortage(
            f"free memory differs by more than {FREE_SPREAD:.0%} between the GPUs once weights are loaded "
            f"({told}): something else takes memory on one of them; free it, or choose other GPUs"
        )
    return min(pages)


def gib(size: int) -> str:
    """Format bytes."""
    return f"{size / GIB:.2f} GiB"
