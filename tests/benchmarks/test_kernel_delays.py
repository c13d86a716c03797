"""Delays of kernels, computed from a trace."""

from __future__ import annotations

import pytest
from common_parts.kernel_delays import Part, parts


def kernel(name: str, begin: float, end: float, grid: list[int] | None = None) -> dict[str, object]:
    args = {} if grid is None else {"grid": grid}
    return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": args}


def test_overlapping_kernels_count_by_their_delay() -> None:
    events = [
        kernel("second", 1, 12, [4, 1, 1]),  # waits for the first kernel
        kernel("first", 0, 10, [2, 1, 1]),
        {"cat": "cpu_op", "name": "host", "ts": 0, "dur": 100},
        kernel("second", 15, 20, [4, 1, 1]),  # after a gap
    ]
    found = parts(events, 2)
    assert found == {
        "2x1x1 first": Part(held=5.0, busy=5.0, calls=0.5),
        "4x1x1 second": Part(held=5.0, busy=8.0, calls=1.0),
    }
    assert sum(part.held for part in found.values()) * 2 == pytest.approx(20)


def test_a_trace_without_device_events_has_no_kernels() -> None:
    assert parts([{"cat": "cpu_op", "name": "host", "ts": 0, "dur": 100}], 1) == {}
