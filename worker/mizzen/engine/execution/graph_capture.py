# SPDX-License-Identifier: Apache-2.0
"""Captures a CUDA graph; used for decode, prefill and logprob graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch


def capture_graph(
    enqueue: Callable[[], None], stream: torch.cuda.Stream, pool: tuple[int, int] | None
) -> torch.cuda.CUDAGraph:
    """Capture the work that a function enqueues, and return the graph.

    Other threads may call CUDA during the capture.

    Args:
        enqueue: Enqueues the work. It is called once before the capture as well, because no kernels can be
            loaded during a capture.
        stream: Stream of the work; must be the current stream.
        pool: Memory pool of the graph; None creates one.
    """
    enqueue()
    graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    handle = cast("torch.cuda._POOL_HANDLE | None", pool)  # a NewType that PyTorch does not document
    with torch.cuda.graph(graph, pool=handle, stream=stream, capture_error_mode="thread_local"):
        enqueue()
    return graph
