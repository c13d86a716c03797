"""Compute the size of the shared memory through which the ranks of a pod receive step plans."""

from __future__ import annotations

from pathlib import Path

from mizzen.engine.config import EngineOptions
from mizzen.models.registry import read_config
from mizzen.wire.ranks.plan_ring import CAPACITY

MAX_RING_BYTES = 256 << 20
"""Maximum size of the ring in bytes; over time all of it is used."""
TOKEN_BYTES = 4
PAGE_BYTES = 12
REQUEST_BYTES = 64
"""Bytes for a slot that decodes, starts or prefills a chunk, apart from its tokens and pages."""


def plan_memory_bytes(options: EngineOptions) -> int:
    """Return the size in bytes of a ring that holds two of the largest plans, up to `MAX_RING_BYTES`.

    The largest plan has the maximum number of tokens of a step and starts every slot with a cached prefix,
    whose pages it lists.

    Raises:
        ValueError: the tokens alone would not fit.
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
