# SPDX-License-Identifier: Apache-2.0
"""Result tables of the GPU benchmarks; each row has a figure, its limit, and its share of the limit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any


class Table:
    """Result table whose rows are printed when they are added, and kept as data for `--json`."""

    def __init__(self, title: str) -> None:
        self.rows: list[dict[str, Any]] = []
        print(title)
        print(f"  {'work':<26} {'measured':>16} {'limit':>16} {'of limit':>9}", flush=True)

    def row(
        self, work: str, figure: float | Sequence[float], limit: float | None, unit: str, note: str = ""
    ) -> float | None:
        """Print a row and return the figure's share of the limit; None if the limit is unknown.

        The limit of a rate (a unit that ends with "/s") is a maximum, and the limit of a time is a minimum.

        Args:
            work: the name of the row.
            figure: one number, or the figures of all rounds, whose median is shown.
            limit: the limit in the same unit; None or NaN if unknown.
            unit: the unit of figure and limit.
            note: text to print after the row.
        """
        rounds = None if isinstance(figure, int | float) else list(figure)
        middle = figure if isinstance(figure, int | float) else statistics.median(figure)
        limit = None if limit is None or math.isnan(limit) else limit
        share = None if limit is None else middle / limit if unit.endswith("/s") else limit / middle
        cells = [f"{number:,.2f} {unit}" if number is not None else "-" for number in (middle, limit)]
        percent = "-" if share is None else f"{share:.0%}"
        print(f"  {work:<26} {cells[0]:>16} {cells[1]:>16} {percent:>9}  {note}".rstrip(), flush=True)
        values = {"figure": middle, "unit": unit, "limit": limit, "share": share, "rounds": rounds}
        self.rows.append({"work": work.strip(), **values, "note": note})
        return share


def drifts(first: Sequence[dict[str, Any]], last: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the relative change of each figure between two measurements of the same rows."""
    pairs = zip(first, last, strict=True)
    return {before["work"]: after["figure"] / before["figure"] - 1 for before, after in pairs}
