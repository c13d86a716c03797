"""The tables of the GPU benchmarks: rows of a figure, its limit, and how near it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any


class Table:
    """Rows, printed as they come and kept as data, which `--json` gives in full."""

    def __init__(self, title: str) -> None:
        self.rows: list[dict[str, Any]] = []
        print(title)
        print(f"  {'work':<26} {'measured':>16} {'limit':>16} {'of limit':>9}", flush=True)

    def row(
        self, work: str, figure: float | Sequence[float], limit: float | None, unit: str, note: str = ""
    ) -> float | None:
        """Print a row; return the share of the limit. A rate has a limit above it, a time one below it.

        A figure is what each round gave, whose median is told, or a number alone. There is no share where the
        limit is None or not known (NaN).
        """
        rounds = None if isinstance(figure, int | float) else list(figure)
        middle = figure if isinstance(figure, int | float) else statistics.median(figure)
        limit = None if limit is None or math.isnan(limit) else limit
        share = None if limit is None else middle / limit if unit.endswith("/s") else limit / middle
        cells = [f"{number:,.2f} {unit}" if number is not None else "-" for number in (middle, limit)]
        percent = "-" if share is None else f"{share:.0%}"
        print(f"  {work:<26} {cells[0]:>16} {cells[1]:>16} {percent:>9}  {note}".rstrip(), flush=True)
        told = {"figure": middle, "unit": unit, "limit": limit, "share": share, "rounds": rounds}
        self.rows.append({"work": work.strip(), **told, "note": note})
        return share


def drifts(first: Sequence[dict[str, Any]], last: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return by how much each figure changed from one measurement to another of the same, as a share."""
    pairs = zip(first, last, strict=True)
    return {before["work"]: after["figure"] / before["figure"] - 1 for before, after in pairs}
