# SPDX-License-Identifier: Apache-2.0
"""Traces of steps with PyTorch's profiler, and NVTX ranges for NVIDIA's tools.

With `--profile`, the loader wraps the runner in a `ProfilingRunner`; SIGUSR2 then starts a trace.
"""

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


def step_title(plan: StepPlan) -> str:
    """Return a trace label that names a step and its size."""
    prompts = sum(len(chunk.tokens) for chunk in plan.prefill)
    return f"step {plan.step}: {len(plan.decode)} decodes, {prompts} prompt tokens"


class ProfilingRunner:
    """Wraps a runner to mark launches and waits as named ranges, and to trace steps on request.

    All methods except `request_trace` are called from one thread. A trace contains the kernels of its steps.
    Writing it takes about a second, during which no step is launched.
    """

    def __init__(self, runner: Runner, folder: Path, steps: int, device: torch.device) -> None:
        """Wrap a runner.

        Args:
            runner: The runner that executes the steps.
            folder: Folder for traces; `validate.make_trace_folder` has created it.
            steps: Number of steps in a trace.
            device: Device of the runner.
        """
        self.runner = runner
        self.folder = folder
        self.steps = steps
        self.on_gpu = device.type == "cuda"
        self.requested = False
        self.trace: profile | None = None
        self.first_step = self.last_step = 0
        """Numbers of the first and the last step of the current trace."""

    def request_trace(self) -> None:
        """Start a trace with the next step, or after the current trace; safe in a signal handler."""
        self.requested = True

    @contextmanager
    def named_range(self, name: str) -> Iterator[None]:
        """Mark the work inside the context as a range, in the current trace and for NVTX."""
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
        """Enqueue a step after the steps in flight; start a trace with it if one was requested."""
        if self.requested and self.trace is None:
            self.begin_trace(plan.step)
        with self.named_range(step_title(plan)):
            self.runner.launch(plan)

    def ready(self) -> bool:
        """Return whether `collect` would return without waiting."""
        return self.runner.ready()

    def collect(self) -> StepTokens:
        """Wait for the oldest step in flight and return its tokens; end the trace after its last step."""
        with self.named_range("wait for tokens"):
            tokens = self.runner.collect()
        if self.trace is not None and tokens.step >= self.last_step:
            self.end_trace()
        return tokens

    def close(self) -> None:
        """Wait for the steps in flight and free the device; write the current trace, if there is one."""
        self.runner.close()
        if self.trace is not None:
            self.end_trace()

    def begin_trace(self, step: int) -> None:
        """Start a trace whose first step is `step`."""
        self.requested = False
        self.first_step, self.last_step = step, step + self.steps - 1
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        # On the CPU, operations run in a worker thread.
        experimental_config = None if self.on_gpu else _ExperimentalConfig(profile_all_threads=True)
        self.trace = profile(activities=activities, experimental_config=experimental_config)
        self.trace.start()

    def end_trace(self) -> None:
        """End the current trace and write it to a file; a failure is only logged."""
        trace, self.trace = self.trace, None
        if trace is None:
            return
        start_time = time.perf_counter()
        path = self.folder / f"steps-{os.getpid()}-{self.first_step}.json.gz"
        try:
            trace.stop()
            trace.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            log.warning("cannot write the trace %s: %s", path, error)
            return
        log.info("wrote the trace %s in %.1f s", path, time.perf_counter() - start_time)
