# SPDX-License-Identifier: Apache-2.0
"""Generate the chart's Grafana dashboards from the `*_board.py` modules in this folder.

    python scripts/dashboards [--check]

With `--check` it writes nothing, and exits with 1 if a file is out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engine_board import ENGINE
from fleet_board import FLEET
from gateway_board import GATEWAY
from operator_board import OPERATOR
from panels import render
from service_board import SERVICE

FOLDER = Path(__file__).resolve().parents[2] / "charts/mizzen/dashboards"
BOARDS = {"service": SERVICE, "engine": ENGINE, "gateway": GATEWAY, "operator": OPERATOR, "fleet": FLEET}


def main(check: bool) -> int:
    """Write the dashboards, or if `check` is set, only compare them with the files; return the exit code."""
    FOLDER.mkdir(exist_ok=True)
    outdated = []
    for name, board in BOARDS.items():
        path, text = FOLDER / f"{name}.json", json.dumps(render(board), indent=1, ensure_ascii=False) + "\n"
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            outdated.append(path.name)
    for name in outdated:
        print(f"{name} is out of date: run python scripts/dashboards", file=sys.stderr)
    return 1 if outdated else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
