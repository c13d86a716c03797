# SPDX-License-Identifier: Apache-2.0
"""Step runners: `CpuRunner` runs steps in a worker thread, `CudaRunner` enqueues them in a CUDA stream.

Both implement `mizzen.core.step_plan.Runner`: steps complete in the order in which they were launched.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from mizzen.core.request import Int32, Int64
from mizzen.core.step_plan import StepPlan, StepTokens
from mizzen.engine.execution.decode_graphs import DecodeGraphs
from mizzen.engine.execution.step import Executor, StepResult
from mizzen.engine.sampling.side_outputs import DeviceSideOutputs
from mizzen.weights.load import ProgressCallback

StepDelay = Callable[[StepPlan], float]
"""Returns the time in seconds by which to delay a step; tests delay steps to exercise overlap and deferred
frees."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step in flight on CUDA."""

    step: int
    tokens: torch.Tensor
    """Sampled tokens, int64 [samples] in pinned memory; valid when `event` has completed."""
    event: torch.cuda.Event
    """Event that completes after the copies to pinned memory."""
    side_outputs: DeviceSideOutputs | None
    """Side outputs in pinned memory; valid when `event` has completed."""

    def wait_for_tokens(self) -> Int64:
        """Wait for the step and return its tokens, int64 [samples]."""
        self.event.synchronize()
        return self.tokens.numpy()


def as_token_column(tokens: torch.Tensor) -> Int32:
    """Convert tokens [samples] on the host to int32 [samples, 1]."""
    return tokens.numpy().astype(np.int32)[:, None]


def copy_to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Enqueue the copy of a device tensor to new pinned memory, and return the copy."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def count_up(progress: ProgressCallback, total: int) -> Callable[[], None]:
    """Return a function that counts its calls and reports the count, out of `total`, to `progress`."""
    done = count(1)
    return lambda: progress(next(done), total)


class CpuRunner:
    """Runs steps one after the other in a worker thread, asynchronously like a GPU."""

    def __init__(self, step: Executor, *, threads: int, delay: StepDelay | None = None) -> None:
        """Start the worker thread; `threads` is the number of threads that PyTorch uses for an operation."""
        self.step = step
        self.delay = delay
        # PyTorch's thread count is a setting of the calling thread.
        self.worker = ThreadPoolExecutor(1, "mizzen-step", torch.set_num_threads, (threads,))
        self.pending: deque[Future[StepTokens]] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step after the steps in flight, and return at once."""
        self.pending.append(self.worker.submit(self.run, plan))

    def run(self, plan: StepPlan) -> StepTokens:
        """Run one step, in the worker thread."""
        if self.delay is not None:
            time.sleep(self.delay(plan))
        with torch.inference_mode():
            result = self.step(plan)
            side_outputs = None if result.side_outputs is None else result.side_outputs.to_side_outputs()
            tokens = as_token_column(result.tokens)
        self.step.defer_grammar_update(plan, lambda: tokens[:, 0])
        return StepTokens(plan.step, tokens, None, side_outputs)

    def ready(self) -> bool:
        """Return whether `collect` would return without waiting."""
        return bool(self.pending) and self.pending[0].done()

    def collect(self) -> StepTokens:
        """Wait for the oldest step in flight and return its tokens."""
        return self.pending.popleft().result()

    def close(self) -> None:
        """Wait for the steps in flight and stop the thread."""
        self.worker.shutdown(wait=True)
        self.pending.clear()


class CudaRunner:
    """Enqueues steps in a CUDA stream.

    Each step is followed by copies of its outputs to pinned memory, and then by an event.

    Decode-only steps are replays of captured graphs where possible; `step` runs all others.
    """

    def __init__(
        self,
        step: Executor,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
        progress: ProgressCallback = lambda done, total: None,
    ) -> None:
        """Capture the graphs.

        Args:
            step: Runs steps without decode graphs; its prefill graphs are captured here as well.
            device: The GPU.
            graphs: Decode graphs to capture; None runs decode-only steps eagerly.
            progress: Called after each capture with the number of graphs captured so far and the total.
        """
        self.step = step
        self.decode_graphs = graphs
        self.stream = torch.cuda.Stream(device)
        total = (graphs.graph_count if graphs else 0) + (
            step.prefill_graphs.graph_count if step.prefill_graphs else 0
        )
        captured = count_up(progress, total)
        pool = None
        if graphs is not None:
            graphs.capture(self.stream, captured)
            pool = next(iter(graphs.graphs.values())).pool()
        if step.prefill_graphs is not None:
            step.prefill_graphs.capture(self.stream, captured, pool)
        self.pending: deque[LaunchedStep | Exception] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step after the steps in flight, and return at once."""
        try:
            self.pending.append(self.enqueue(plan))
        except Exception as error:  # `collect` raises it when this step is the oldest
            self.pending.append(error)

    def enqueue(self, plan: StepPlan) -> LaunchedStep:
        """Enqueue a step and the copies of its outputs to the host."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            result = self.run(plan)
            host = copy_to_pinned(result.tokens)
            side_outputs = (
                None if result.side_outputs is None else result.side_outputs.copy_with(copy_to_pinned)
            )
            event = torch.cuda.Event()
            event.record(self.stream)
        launched = LaunchedStep(plan.step, host, event, side_outputs)
        self.step.defer_grammar_update(plan, launched.wait_for_tokens)
        return launched

    def run(self, plan: StepPlan) -> StepResult:
        """Enqueue a step: as the replay of a decode graph where possible, else with `step`."""
        graphs = self.decode_graphs
        if graphs is None:
            return self.step(plan)
        if graphs.can_run(plan):
            self.step.prepare_replay(plan)
            return graphs(plan)
        graphs.invalidate_batch()
        return self.step(plan)

    def ready(self) -> bool:
        """Return whether `collect` would return without waiting."""
        if not self.pending:
            return False
        first = self.pending[0]
        return isinstance(first, Exception) or first.event.query()

    def collect(self) -> StepTokens:
        """Wait for the oldest step in flight and return its tokens."""
        first = self.pending.popleft()
        if isinstance(first, Exception):
            raise first
        first.event.synchronize()
        side_outputs = None if first.side_outputs is None else first.side_outputs.to_side_outputs()
        return StepTokens(first.step, as_token_column(first.tokens), None, side_outputs)

    def close(self) -> None:
        """Wait for the steps in flight, then drop the graphs, which keep the ranks' collectives alive."""
        self.stream.synchronize()
        self.pending.clear()
        self.decode_graphs = None
        self.step.drop_graphs()
