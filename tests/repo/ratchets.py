# SPDX-License-Identifier: Apache-2.0
"""Ratchets: recorded counts of style violations, which may only decrease.

A test counts violations and calls `check("call_arity", {"callee": 3}, ...)`. The counts must equal those in
`ratchets.json`. A higher count fails, and a lower count must be recorded with

    UPDATE_RATCHETS=1 pytest -n 0 tests/repo

This command fails if the total of a test's violations would grow, unless `RAISE=1` is set as well.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("ratchets.json")
MAX_SHOWN = 200
"""Maximum number of violations that a failed check lists."""


def tracked(*endings: str) -> list[Path]:
    """Return the paths, relative to the root, of files with these endings that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    return [Path(name) for name in sorted(set(names)) if name.endswith(endings) and (ROOT / name).is_file()]


def check(name: str, counts: Mapping[str, int], places: Sequence[str] = ()) -> None:
    """Compare counts of violations with the recorded counts, or record them if UPDATE_RATCHETS is set.

    Args:
        name: name of the check in `ratchets.json`.
        counts: number of violations, by any key (such as a folder or a function).
        places: a line for each violation, listed if the check fails.

    Raises:
        AssertionError: A count differs from the recorded one.
    """
    counts = {key: count for key, count in sorted(counts.items()) if count}
    if os.environ.get("UPDATE_RATCHETS"):
        _update(name, counts)
        return
    written: dict[str, int] = _load().get(name, {})
    worse = [
        f"{key}: {count}, {written.get(key, 0)} recorded"
        for key, count in counts.items()
        if count > written.get(key, 0)
    ]
    better = [
        f"{key}: {counts.get(key, 0)}, {count} recorded"
        for key, count in written.items()
        if count > counts.get(key, 0)
    ]
    lines = []
    if worse:
        lines += [f"{name}: {len(worse)} counts have increased", *worse, "", "violations:", *_some(places)]
    if better:
        lines += [f"{name}: fewer than recorded; run UPDATE_RATCHETS=1 pytest -n 0 tests/repo", *better]
    assert not lines, "\n".join(lines)


def _some(lines: Sequence[str]) -> list[str]:
    more = len(lines) - MAX_SHOWN
    return [*lines[:MAX_SHOWN], *([f"... and {more} more"] if more > 0 else [])]


def _load() -> dict[str, dict[str, int]]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def _update(name: str, counts: dict[str, int]) -> None:
    with FILE.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # other processes of the same run record other counts
        file.seek(0)
        text = file.read()
        ratchets = json.loads(text) if text else {}
        old, new = sum(ratchets.get(name, {}).values()), sum(counts.values())
        if new > old and name in ratchets and not os.environ.get("RAISE"):
            raise AssertionError(f"{name} would grow from {old} to {new}; set RAISE=1 to allow it")
        ratchets[name] = counts
        file.seek(0)
        file.truncate()
        file.write(json.dumps(ratchets, indent=1, sort_keys=True) + "\n")
