"""Plot panels of the dashboards from what a Prometheus has, for the documentation.

    python scripts/plot_dashboards.py http://127.0.0.1:9090 --start UNIX --end UNIX

Writes a picture for each board of `PANELS` into `docs/images/`. The queries are those of the dashboards, with
every variable at All. `PLOTS=docs/images pytest tests/observability` makes them from the cluster under load
and faults that the tests live through. It needs matplotlib (`pip install matplotlib`), which no extra brings.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
BOARDS = ROOT / "charts/mizzen/dashboards"
WINDOW = "15s"
COLOURS = 48
"""Enough for lines, and a third of the bytes."""
PANELS = {
    "service": (
        "Requests by status code",
        "Failures",
        "Time to the first token",
        "Between tokens",
        "Requests in the engines",
        "KV cache in use",
    ),
    "engine": (
        "Running requests",
        "Step time",
        "Tokens generated",
        "Pages",
        "Prefix cache hits",
        "Engines by state",
    ),
    "gateway": (
        "Requests by endpoint",
        "What decided routes",
        "Tokens in work, by engine",
        "Engines by state",
        "Attempts that failed",
        "Answers that went on elsewhere",
    ),
    "operator": (
        "Looks at services",
        "Time of a look",
        "Requests to the API server",
        "Changes made",
        "Services by condition",
        "Rollouts under way",
    ),
}
UNITS = {"s": "seconds", "reqps": "requests/s", "ops": "a second", "percentunit": "share", "bytes": "bytes"}


def series(url: str, expr: str, start: float, end: float) -> list[dict[str, Any]]:
    """Return what a query gave over time."""
    expr = re.sub(r"\$[a-z]+\b", ".*", expr.replace("$__rate_interval", WINDOW))
    given = urllib.parse.urlencode({"query": expr, "start": start, "end": end, "step": 1})
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{given}", timeout=60) as answer:
        return json.load(answer)["data"]["result"]


def name(legend: str, labels: dict[str, str]) -> str:
    """Return a line's name, as Grafana makes it."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend)


def lines(url: str, panel: dict[str, Any], start: float, end: float) -> dict[str, list[tuple[float, float]]]:
    """Return the lines of a panel, by name: seconds since the start, and values."""
    found: dict[str, list[tuple[float, float]]] = {}
    for target in panel["targets"]:
        for one in series(url, target["expr"], start, end):
            points = [(at - start, float(value)) for at, value in one["values"]]
            points = [(at, value) for at, value in points if math.isfinite(value)]
            if points:
                found[name(target.get("legendFormat", ""), one["metric"])] = points
    return found


def draw(axes: Any, panel: dict[str, Any], found: dict[str, list[tuple[float, float]]]) -> None:
    """Draw one panel."""
    for label, points in sorted(found.items()):
        axes.plot(*zip(*points, strict=True), label=label, linewidth=1)
    unit = UNITS.get(panel["fieldConfig"]["defaults"]["unit"], "")
    axes.set_title(panel["title"], fontsize=9, loc="left")
    axes.set_ylabel(unit, fontsize=7)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    if found:
        axes.legend(fontsize=6, frameon=False, loc="upper left")


def plot(url: str, board: str, start: float, end: float, folder: Path) -> Path:
    """Plot the chosen panels of a dashboard into one picture; returns its file.

    Raises:
        KeyError: the dashboard has no panel of a name.
    """
    panels = {panel["title"]: panel for panel in json.loads((BOARDS / f"{board}.json").read_text())["panels"]}
    titles = PANELS[board]
    figure, grid = pyplot.subplots(2, 3, figsize=(11, 5), layout="constrained")
    for axes, title in zip(grid.flat, titles, strict=True):
        draw(axes, panels[title], lines(url, panels[title], start, end))
    figure.supxlabel("seconds", fontsize=8)
    path = folder / f"dashboard-{board}.png"
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLOURS).save(path, optimize=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="base URL of a Prometheus")
    parser.add_argument("--start", type=float, default=time.time() - 600, help="Unix time (ten minutes ago)")
    parser.add_argument("--end", type=float, default=time.time(), help="Unix time (now)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    given = parser.parse_args()
    mpl.use("agg")
    given.out.mkdir(parents=True, exist_ok=True)
    for board in PANELS:
        print(plot(given.url.rstrip("/"), board, given.start, given.end, given.out))


if __name__ == "__main__":
    main()
