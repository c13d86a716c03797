"""Captures one CUDA graph; decode, prefill and logprob graphs all use it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture_graph(
    enqueue: Callable[[], None], stream: torch.cuda.Stream, pool: tuple[int, int] | None
) -> torch.cuda.CUDAGraph:
    """Return a graph of the work that `enqueue` enqueues in `stream`, which must be the current stream.

    `enqueue` runs once before the capture, because kernels cannot be loaded during it. Other threads may call
    CUDA meanwhile. The graph's memory comes from `pool`.
    """
    enqueue()
    graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        enqueue()
    return graph
