"""How every graph of the engine is captured."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured_graph(
    enqueue: Callable[[], None], stream: torch.cuda.Stream, pool: tuple[int, int] | None
) -> torch.cuda.CUDAGraph:
    """Return a graph of what `enqueue` does in the current stream, which is `stream`, with memory of a pool.

    It is done once before: that loads kernels, which a capture cannot. Other threads may call CUDA meanwhile.
    """
    enqueue()
    graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        enqueue()
    return graph
