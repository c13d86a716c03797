# SPDX-License-Identifier: Apache-2.0
"""Draws when the kernels of one layer run, from a trace of PyTorch's profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from common_parts.kernel_delays import print_kernels, sort_by_end, times_by_kernel

COLUMNS = 48


@dataclass(frozen=True, slots=True)
class LayerKernel:
    """When a kernel of a layer runs, in microseconds since the end of the last kernel before the layer."""

    name: str
    begin: float
    """Start of the kernel; negative if it started before the layer, to wait for the kernel before it."""
    end: float


def layer_timeline(events: Iterable[dict[str, Any]], layers: int, steps: int) -> list[LayerKernel]:
    """Return the kernels of one layer in the middle of a trace, in the order in which they end.

    A layer lasts from a call of a kernel to the next call of the same kernel. It is the first kernel that
    runs once in each layer of each step. The result is empty if there is no such kernel.

    Args:
        events: the events of a trace in Chrome's format (`ts` and `dur` in microseconds).
        layers: the number of layers of the model.
        steps: the number of steps in the trace.
    """
    on_device = sort_by_end(events)
    calls = Counter(event["name"] for event in on_device)
    first = next((event["name"] for event in on_device if calls[event["name"]] == layers * steps), None)
    if first is None or layers < 2:
        return []
    at = [index for index, event in enumerate(on_device) if event["name"] == first]
    middle = steps // 2 * layers + (layers - 1) // 2  # the next call is in the same step
    begin, end = at[middle], at[middle + 1]
    before = on_device[begin - 1] if begin else None
    origin = on_device[begin]["ts"] if before is None else before["ts"] + before["dur"]
    return [
        LayerKernel(event["name"], event["ts"] - origin, event["ts"] + event["dur"] - origin)
        for event in on_device[begin:end]
    ]


def draw_timeline(kernels: list[LayerKernel]) -> list[str]:
    """Return one line per kernel: its start and end, and a bar.

    In a bar, `=` stands for the time in which no earlier kernel runs, and `-` for the time before it.
    """
    if not kernels:
        return []
    scale = COLUMNS / kernels[-1].end
    lines, previous_end = [], 0.0
    for kernel in kernels:
        waits, runs, ends = (
            round(max(0.0, time) * scale)
            for time in (kernel.begin, max(kernel.begin, previous_end), kernel.end)
        )
        bar = " " * waits + "-" * (runs - waits) + "=" * (ends - runs)
        lines.append(f"  {kernel.begin:8.1f} {kernel.end:8.1f}  |{bar:<{COLUMNS}}| {kernel.name[:70]}")
        previous_end = kernel.end
    return lines


def print_timeline(kernels: list[LayerKernel]) -> None:
    """Print when the kernels of a layer run; an empty list prints nothing."""
    if kernels:
        print(
            "  one layer: start and end of each kernel in us; `-` is before the end of the kernel before it"
        )
        print("\n".join(draw_timeline(kernels)))


def report_trace(events: list[dict[str, Any]], layers: int, steps: int) -> dict[str, dict[str, float]]:
    """Print the times of kernels and the timeline of a layer, and return the times, by kernel.

    The arguments are those of `layer_timeline`.
    """
    kernels = times_by_kernel(events, steps)
    print_kernels(kernels)
    print_timeline(layer_timeline(events, layers, steps))
    return {name: asdict(part) for name, part in kernels.items()}
