"""Traces of steps on demand, by PyTorch's profiler; and NVTX ranges, for NVIDIA's."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from mizzen.core.step_plan import Runner, StepPlan, StepTokens

log = logging.getLogger(__name__)


def title(plan: StepPlan) -> str:
    """Say what a step does."""
    prompts = sum(len(chunk.tokens) for chunk in plan.prefill)
    return f"step {plan.step}: {len(plan.decode)} decodes, {prompts} prompt tokens"


class ProfiledRunner:
    """A runner whose launches and waits are named ranges, and are traced when asked.

    Used from one thread, but for `request`. A trace holds the kernels of its steps; while it is written, for
    a second or so, no step is launched.
    """

    def __init__(self, runner: Runner, folder: Path, steps: int, device: torch.device) -> None:
        """Write traces of so many steps to a folder that `refusals.make_trace_folder` has made."""
        self.runner = runner
        self.folder = folder
        self.steps = steps
        self.on_gpu = device.type == "cuda"
        self.requested = False
        self.trace: profile | None = None
        self.first = self.last = 0
        """The steps of the trace that is being taken."""

    def request(self) -> None:
        """Let a trace begin with the next step, unless one is being taken; safe in a signal handler."""
        self.requested = True

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Name what happens inside."""
        if self.on_gpu:
            torch.cuda.nvtx.range_push(name)
        try:
            if self.trace is None:
                yield
            else:
                with record_function(name):
                    yield
        finally:
            if self.on_gpu:
                torch.cuda.nvtx.range_pop()

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step behind those in flight."""
        if self.requested and self.trace is None:
            self.begin(plan.step)
        with self.range(title(plan)):
            self.runner.launch(plan)

    def ready(self) -> bool:
        """Tell whether `collect` would return without waiting."""
        return self.runner.ready()

    def collect(self) -> StepTokens:
        """Wait for the oldest step in flight and return its tokens."""
        with self.range("wait for tokens"):
            tokens = self.runner.collect()
        if self.trace is not None and tokens.step >= self.last:
            self.end()
        return tokens

    def close(self) -> None:
        """Wait for what is in flight and free the device; a trace that was begun is written."""
        self.runner.close()
        if self.trace is not None:
            self.end()

    def begin(self, step: int) -> None:
        """Begin a trace with a step."""
        self.requested = False
        self.first, self.last = step, step + self.steps - 1
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        # On the CPU operations run in a thread of their own.
        how = None if self.on_gpu else _ExperimentalConfig(profile_all_threads=True)
        self.trace = profile(activities=activities, experimental_config=how)
        self.trace.start()

    def end(self) -> None:
        """Write the trace; a failure is logged, for it is no reason to stop serving."""
        trace, self.trace = self.trace, None
        if trace is None:
            return
        begin = time.perf_counter()
        path = self.folder / f"steps-{os.getpid()}-{self.first}.json.gz"
        try:
            trace.stop()
            trace.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            log.warning("no trace was written to %s: %s", path, error)
            return
        log.info("wrote the trace %s in %.1f s", path, time.perf_counter() - begin)
