"""What holds a step: each kernel's part of the time on the device, from a trace of PyTorch's profiler.

Kernels that overlap (programmatic dependent launch) begin before the one ahead has ended and wait in it, so
that their durations add to more than the step. What counts is by how much each delays the end: the time from
the end of whatever ended before it to its own end. These parts add to the whole, gaps included.
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
class Part:
    """A kernel of one grid, in microseconds a step."""

    held: float
    """By how much it delays the end of the step."""
    busy: float
    """From its begin to its end, waiting included."""
    calls: float


def parts(events: Iterable[dict[str, Any]], steps: int) -> dict[str, Part]:
    """Return what holds each of so many steps, by kernel and grid, the longest first.

    Args:
        events: of a trace in Chrome's format (`ts` and `dur` in microseconds).
        steps: that the trace has.
    """
    on_device = [event for event in events if event.get("cat") in ON_DEVICE]
    on_device.sort(key=lambda event: event["ts"] + event["dur"])
    found: dict[str, Part] = {}
    before = min((event["ts"] for event in on_device), default=0.0)
    for event in on_device:
        end = event["ts"] + event["dur"]
        grid = event.get("args", {}).get("grid")
        name = event["name"] if grid is None else f"{'x'.join(map(str, grid))} {event['name']}"
        old = found.get(name, Part(0.0, 0.0, 0.0))
        found[name] = Part(
            held=old.held + (end - before) / steps,
            busy=old.busy + event["dur"] / steps,
            calls=old.calls + 1 / steps,
        )
        before = end
    return dict(sorted(found.items(), key=lambda item: -item[1].held))


def traced(export: Callable[[str], object], steps: int) -> dict[str, Part]:
    """Return the parts of a trace that `export` writes to a path."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        export(str(path))
        return parts(json.loads(path.read_text())["traceEvents"], steps)


def show(found: dict[str, Part]) -> None:
    """Print the kernels that delay a step most."""
    for name, part in list(found.items())[:SHOWN]:
        print(f"  {part.held:8.1f} us, busy {part.busy:8.1f}, {part.calls:6.1f} calls  {name[:90]}")
    print(f"  {sum(part.held for part in found.values()):8.1f} us in all")
