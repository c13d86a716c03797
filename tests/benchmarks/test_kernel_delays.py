# SPDX-License-Identifier: Apache-2.0
"""The delay that each kernel adds to a step, computed from a trace with overlapping kernels."""

from __future__ import annotations

import pytest
from common_parts.kernel_delays import KernelTimes, times_by_kernel


def kernel(name: str, begin: float, end: float, grid: list[int] | None = None) -> dict[str, object]:
    args = {} if grid is None else {"grid": grid}
    return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": args}


def test_overlapping_kernels_count_by_their_delay() -> None:
    events = [
        kernel("second", 1, 12, [4, 1, 1]),  # starts during the first kernel and waits for it (PDL)
        kernel("first", 0, 10, [2, 1, 1]),
        {"cat": "cpu_op", "name": "host", "ts": 0, "dur": 100},
        kernel("second", 15, 20, [4, 1, 1]),  # starts after a gap without kernels
    ]
    times = times_by_kernel(events, 2)
    assert times == {
        "2x1x1 first": KernelTimes(held=5.0, busy=5.0, calls=0.5),
        "4x1x1 second": KernelTimes(held=5.0, busy=8.0, calls=1.0),
    }
    assert sum(kernel_time.held for kernel_time in times.values()) * 2 == pytest.approx(20)


def test_a_trace_without_device_events_has_no_kernels() -> None:
    assert times_by_kernel([{"cat": "cpu_op", "name": "host", "ts": 0, "dur": 100}], 1) == {}
