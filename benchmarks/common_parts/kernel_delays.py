# SPDX-License-Identifier: Apache-2.0
"""Computes by how much each kernel delays a step, from a trace of PyTorch's profiler.

With programmatic dependent launch (PDL), a kernel can start before the previous kernel has ended, and then
waits for that kernel. Durations therefore add up to more than the duration of the step. Delays are computed
from the order in which kernels end: the delay of a kernel is the time between the end of the previous kernel
in this order and the end of the kernel itself. Delays add up to the duration of the whole step, including
gaps.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHOWN = 16
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Times of one kernel with one grid size, in microseconds per step."""

    held: float
    """Time by which the kernel delays the end of the step."""
    busy: float
    """Duration of the kernel, including the time for which it waits for the previous kernel."""
    calls: float
    """Number of launches per step."""


def sort_by_end(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of a trace that are kernels, copies or fills, in the order in which they end."""
    on_device = [event for event in events if event.get("cat") in ON_DEVICE]
    return sorted(on_device, key=lambda event: event["ts"] + event["dur"])


def times_by_kernel(events: Iterable[dict[str, Any]], steps: int) -> dict[str, KernelTimes]:
    """Return the times of each combination of kernel and grid size, the largest delay first.

    Each key consists of the grid size, if the trace has one, and the name of the kernel.

    Args:
        events: the events of a trace in Chrome's format (`ts` and `dur` in microseconds).
        steps: the number of steps in the trace.
    """
    on_device = sort_by_end(events)
    kernels: dict[str, KernelTimes] = {}
    previous_end = min((event["ts"] for event in on_device), default=0.0)
    for event in on_device:
        end = event["ts"] + event["dur"]
        grid = event.get("args", {}).get("grid")
        name = event["name"] if grid is None else f"{'x'.join(map(str, grid))} {event['name']}"
        old = kernels.get(name, KernelTimes(0.0, 0.0, 0.0))
        kernels[name] = KernelTimes(
            held=old.held + (end - previous_end) / steps,
            busy=old.busy + event["dur"] / steps,
            calls=old.calls + 1 / steps,
        )
        previous_end = end
    return dict(sorted(kernels.items(), key=lambda item: -item[1].held))


def read_events(export: Callable[[str], object]) -> list[dict[str, Any]]:
    """Return the events of a trace in Chrome's format; `export` writes the trace to a path."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        export(str(path))
        return json.loads(path.read_text())["traceEvents"]


def trace_kernels(export: Callable[[str], object], steps: int) -> dict[str, KernelTimes]:
    """Return the times of the kernels in a trace of `steps` steps; `export` writes the trace to a path."""
    return times_by_kernel(read_events(export), steps)


def print_kernels(kernels: dict[str, KernelTimes]) -> None:
    """Print the kernels that delay a step most, and the sum of all delays."""
    for name, part in list(kernels.items())[:SHOWN]:
        print(f"  {part.held:8.1f} us, busy {part.busy:8.1f}, {part.calls:6.1f} calls  {name[:90]}")
    print(f"  {sum(part.held for part in kernels.values()):8.1f} us in total")
