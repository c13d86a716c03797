# SPDX-License-Identifier: Apache-2.0
"""The sequence of calls that capture a CUDA graph; fakes replace the CUDA functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from mizzen.engine.execution.graph_capture import capture_graph


def test_work_is_run_and_completed_once_before_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []

    @contextmanager
    def graph(graph: object, **options: object) -> Iterator[None]:
        events.append(options)
        yield
        events.append(graph)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    monkeypatch.setattr(torch.cuda, "graph", graph)
    stream = cast(torch.cuda.Stream, SimpleNamespace(synchronize=lambda: events.append("completed")))
    assert capture_graph(lambda: events.append("run"), stream, (0, 1)) == "graph"
    options = {"pool": (0, 1), "stream": stream, "capture_error_mode": "thread_local"}
    assert events == ["run", "completed", options, "run", "graph"]
