# SPDX-License-Identifier: Apache-2.0
"""The timeline of a layer, from a trace with overlapping kernels."""

from __future__ import annotations

from common_parts.layer_timeline import COLUMNS, LayerKernel, draw_timeline, layer_timeline


def kernel(name: str, begin: float, end: float) -> dict[str, object]:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin}


def step(begin: float, layers: int) -> list[dict[str, object]]:
    """Return an embedding and layers of 20 us: a GEMM, and attention that starts 2 us before its end."""
    events = [kernel("embedding", begin, begin + 5)]
    for layer in range(layers):
        at = begin + 5 + 20 * layer
        events += [kernel("attention", at + 8, at + 20), kernel("gemm", at, at + 10)]
    return events


def test_a_layer_lasts_from_its_first_kernel_to_the_next_layer() -> None:
    timeline = layer_timeline([*step(0, 3), *step(100, 3)], layers=3, steps=2)
    assert timeline == [LayerKernel("gemm", 0, 10), LayerKernel("attention", 8, 20)]


def test_bars_show_which_time_is_before_the_end_of_the_kernel_before() -> None:
    first, second = draw_timeline([LayerKernel("gemm", 0, 10), LayerKernel("attention", 8, 20)])
    begin, run, end = round(8 / 20 * COLUMNS), COLUMNS // 2, COLUMNS
    assert f"|{'=' * run}{' ' * run}| gemm" in first
    assert f"|{' ' * begin}{'-' * (run - begin)}{'=' * (end - run)}| attention" in second


def test_without_a_kernel_that_runs_once_a_layer_there_is_no_timeline() -> None:
    assert layer_timeline(step(0, 3), layers=2, steps=1) == []
    assert draw_timeline([]) == []
