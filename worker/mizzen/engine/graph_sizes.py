# SPDX-License-Identifier: Apache-2.0
"""Largest batches for which CUDA graphs are captured. Importing this module does not import torch."""

from __future__ import annotations

from mizzen.engine.config import EngineOptions

MAX_GRAPH_TOKENS = 4096
"""Default maximum number of tokens of a captured step; larger graphs would take memory from the KV cache."""


def max_graph_rows(options: EngineOptions) -> int:
    """Return the maximum number of rows of a captured decode step; 0 without graphs."""
    if options.device != "cuda" or options.cuda_graph == "off":
        return 0
    return min(options.cuda_graph_max_batch, options.max_running_requests)


def max_graph_tokens(options: EngineOptions) -> int:
    """Return the maximum number of tokens of a captured step; 0 without graphs.

    It determines the memory of all graphs, because they share one memory pool.
    """
    rows = max_graph_rows(options)
    prompts = MAX_GRAPH_TOKENS if options.cuda_graph_max_tokens is None else options.cuda_graph_max_tokens
    return max(rows, min(prompts, options.prefill_chunk_tokens + rows)) if rows else 0
