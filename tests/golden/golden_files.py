# SPDX-License-Identifier: Apache-2.0
"""Golden files: records of Mizzen's public contracts, so that no contract changes unnoticed.

A test collects a contract from the code as plain JSON and calls `check("worker_metrics", collected)`, which
compares it with `data/worker_metrics.json`. After a deliberate change, update the files with

    UPDATE_GOLDENS=1 pytest tests/golden

and review the difference before you commit it.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
UPDATE = "UPDATE_GOLDENS"
MAX_DIFFERENCE = 60
"""A failed check shows at most this many lines of the difference."""


def render(value: Any) -> str:
    """Return a JSON value as the text of a golden file, with one entry per line and sorted keys."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def load(name: str) -> Any:
    """Return the content of a golden file."""
    return json.loads((DATA / f"{name}.json").read_text())


def check(name: str, collected: Any) -> None:
    """Compare a JSON value with the golden file `data/<name>.json`; if UPDATE_GOLDENS is set, write the file.

    Raises:
        AssertionError: The file does not exist, or the value differs; the message shows the difference.
    """
    path, text = DATA / f"{name}.json", render(collected)
    if os.environ.get(UPDATE):
        DATA.mkdir(exist_ok=True)
        path.write_text(text)
        return
    golden = path.read_text() if path.exists() else ""
    if golden == text:
        return
    lines = difflib.unified_diff(
        golden.splitlines(), text.splitlines(), f"data/{path.name}", "the code", lineterm="", n=2
    )
    shown = list(lines)
    if len(shown) > MAX_DIFFERENCE:
        shown = [*shown[:MAX_DIFFERENCE], f"... {len(shown) - MAX_DIFFERENCE} more lines"]
    raise AssertionError(
        "\n".join(
            [f"a public contract has changed; if that is meant: {UPDATE}=1 pytest tests/golden", *shown]
        )
    )
