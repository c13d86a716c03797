# SPDX-License-Identifier: Apache-2.0
"""Compute the size of the shared memory through which the ranks of a pod receive step plans."""

from __future__ import annotations

from pathlib import Path

from mizzen.engine.config import EngineOptions
from mizzen.models.registry import read_config
from mizzen.wire.ranks.plan_ring import CAPACITY

MAX_RING_BYTES = 256 << 20
"""Maximum size of the ring in bytes. Writes go round the ring, so in time even small plans use all of it."""
TOKEN_BYTES = 4
PAGE_BYTES = 12
REQUEST_BYTES = 64
"""Size in bytes of a plan's entry for one slot (decode, start or prefill chunk), not counting tokens and
pages."""


def plan_memory_bytes(options: EngineOptions) -> int:
    """Return the size in bytes of a ring that holds two step plans of maximum size.

    The result is at most `MAX_RING_BYTES`. A plan of maximum size contains as many tokens as a step may have,
    and starts a request in every slot; the plan lists the pages of each request's cached prefix.

    Raises:
        ValueError: the tokens of two such plans alone would exceed `MAX_RING_BYTES`.
    """
    config = read_config(Path(options.model), options.model_implementation)
    context = options.context_length or config.context_length
    slots = options.max_running_requests
    tokens = TOKEN_BYTES * min(options.prefill_chunk_tokens, slots * context)
    if 2 * tokens > MAX_RING_BYTES:
        max_tokens = MAX_RING_BYTES // (2 * TOKEN_BYTES)
        raise ValueError(
            f"--prefill-chunk-tokens {options.prefill_chunk_tokens} is more than rank 0 can send to "
            f"other ranks in one step: with --tensor, at most {max_tokens} are possible"
        )
    pages = PAGE_BYTES * slots * -(-context // options.page_size)
    return min(MAX_RING_BYTES, max(CAPACITY, 2 * (tokens + pages + REQUEST_BYTES * slots)))
