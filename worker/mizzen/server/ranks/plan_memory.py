"""How much memory the ranks of a pod share for plans of steps."""

from __future__ import annotations

from pathlib import Path

from mizzen.engine.config import EngineOptions
from mizzen.models.registry import read_config
from mizzen.wire.ranks.plan_ring import CAPACITY

MAX_RING_BYTES = 256 << 20
"""Bytes at most; all of them come into use as time goes by."""
TOKEN_BYTES = 4
PAGE_BYTES = 12
REQUEST_BYTES = 64
"""Of a slot that decodes, starts or gets a chunk, apart from tokens and pages."""


def plan_memory_bytes(options: EngineOptions) -> int:
    """Return the bytes of a ring that has room for the largest plan twice, as far as that is bounded.

    Such a plan has all the tokens that a step may have, and begins every slot with a cached prefix, whose
    pages it tells.

    Raises:
        ValueError: tokens alone would not fit.
    """
    context = options.context_length or read_config(Path(options.model)).context_length
    slots = options.max_running_requests
    tokens = TOKEN_BYTES * min(options.prefill_chunk_tokens, slots * context)
    if 2 * tokens > MAX_RING_BYTES:
        max_tokens = MAX_RING_BYTES // (2 * TOKEN_BYTES)
        raise ValueError(
            f"--prefill-chunk-tokens {options.prefill_chunk_tokens} is more than ranks hand to one another "
            f"in a step: with --tensor, {max_tokens} at most"
        )
    pages = PAGE_BYTES * slots * -(-context // options.page_size)
    return min(MAX_RING_BYTES, max(CAPACITY, 2 * (tokens + pages + REQUEST_BYTES * slots)))
