"""Runners of steps: on the CPU in a worker thread, on CUDA in a stream."""

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
from mizzen.engine.execution.step import Outcome, Step
from mizzen.engine.sampling.side_outputs import DeviceSide
from mizzen.weights.load import Progress

Delay = Callable[[StepPlan], float]
"""Seconds that a step is held back; tests exercise overlap and fences with it."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way."""

    step: int
    tokens: torch.Tensor
    """int64 [samples] in pinned memory, valid once the event has passed."""
    event: torch.cuda.Event
    side: DeviceSide | None
    """In pinned memory too."""

    def read(self) -> Int64:
        """Wait for the tokens."""
        self.event.synchronize()
        return self.tokens.numpy()


def column(tokens: torch.Tensor) -> Int32:
    """Return tokens [samples] on the host as int32 [samples, 1]."""
    return tokens.numpy().astype(np.int32)[:, None]


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Enqueue a copy to pinned memory of the host."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def one_more(progress: Progress, total: int) -> Callable[[], None]:
    """Return what tells `progress` of one more of `total` each time that it is called."""
    done = count(1)
    return lambda: progress(next(done), total)


class CpuRunner:
    """Runs steps one after the other in a thread of its own, as a device would."""

    def __init__(self, step: Step, *, threads: int, delay: Delay | None = None) -> None:
        self.step = step
        self.delay = delay
        # The number of threads of an operation belongs to the thread that calls it.
        self.worker = ThreadPoolExecutor(1, "mizzen-step", torch.set_num_threads, (threads,))
        self.pending: deque[Future[StepTokens]] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step behind those in flight."""
        self.pending.append(self.worker.submit(self.run, plan))

    def run(self, plan: StepPlan) -> StepTokens:
        """Run one step, in the worker."""
        if self.delay is not None:
            time.sleep(self.delay(plan))
        with torch.inference_mode():
            outcome = self.step(plan)
            side = None if outcome.side is None else outcome.side.read()
            tokens = column(outcome.tokens)
        self.step.sampled(plan, lambda: tokens[:, 0])
        return StepTokens(plan.step, tokens, None, side)

    def ready(self) -> bool:
        """Tell whether `collect` would return without waiting."""
        return bool(self.pending) and self.pending[0].done()

    def collect(self) -> StepTokens:
        """Wait for the oldest step in flight and return its tokens."""
        return self.pending.popleft().result()

    def close(self) -> None:
        """Wait for what is in flight and end the thread."""
        self.worker.shutdown(wait=True)
        self.pending.clear()


class CudaRunner:
    """Enqueues steps on a stream; tokens come back through pinned memory, behind an event each.

    Steps run eagerly; captured graphs take the place of `step` for batches of plain decodes.
    """

    def __init__(
        self,
        step: Step,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """Capture the graphs; `progress` is told how many of all are captured."""
        self.step = step
        self.graphs = graphs
        self.stream = torch.cuda.Stream(device)
        total = (graphs.count if graphs else 0) + (len(step.graphs.sizes) if step.graphs else 0)
        captured = one_more(progress, total)
        pool = None
        if graphs is not None:
            graphs.capture(self.stream, captured)
            pool = next(iter(graphs.graphs.values())).pool()
        if step.graphs is not None:
            step.graphs.capture(self.stream, captured, pool)
        self.pending: deque[Launched | Exception] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step behind those in flight."""
        try:
            self.pending.append(self.enqueue(plan))
        except Exception as error:  # surfaces from collect, in the step's turn
            self.pending.append(error)

    def enqueue(self, plan: StepPlan) -> Launched:
        """Enqueue a step and the copy of its tokens."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            outcome = self.run(plan)
            host = pinned(outcome.tokens)
            side = None if outcome.side is None else outcome.side.copied(pinned)
            event = torch.cuda.Event()
            event.record(self.stream)
        launched = Launched(plan.step, host, event, side)
        self.step.sampled(plan, launched.read)
        return launched

    def run(self, plan: StepPlan) -> Outcome:
        """Enqueue a step."""
        graphs = self.graphs
        if graphs is None:
            return self.step(plan)
        if graphs.takes(plan):
            return graphs(plan)
        graphs.forget()
        return self.step(plan)

    def ready(self) -> bool:
        """Tell whether `collect` would return without waiting."""
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
        side = None if first.side is None else first.side.read()
        return StepTokens(first.step, column(first.tokens), None, side)

    def close(self) -> None:
        """Wait for what is in flight, and let the graphs go: those of ranks hold their collectives."""
        self.stream.synchronize()
        self.pending.clear()
        self.graphs = self.step.graphs = None
