# SPDX-License-Identifier: Apache-2.0
"""Makes the modules of the benchmarks importable, and runs them with a tiny shape."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from common_parts import gpu
from common_parts.tables import Table

SMALL = ("--device=cpu", "--shape=tiny", "--rounds=2")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a benchmark's command line and returns its table and figures."""

    def run(module: Any, *options: str) -> tuple[Table, dict[str, Any]]:
        runs: list[tuple[Table, dict[str, Any]]] = []

        def once(args: argparse.Namespace, measure: gpu.Measure, **_: Any) -> None:
            table = Table(gpu.title(args, "all on"))
            runs.append((table, measure(args, table)))

        monkeypatch.setattr(module, "run", once)
        monkeypatch.setattr(sys, "argv", [module.__name__, *SMALL, *options])
        module.main()
        return runs[0]

    return run
