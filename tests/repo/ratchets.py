"""Ratchets: what the repository still gets wrong, counted, so that it can only become less.

A guard counts its offenders and calls `check("call_arity", {"callee": 3}, ...)`. The counts must equal those
of `ratchets.json`: more is a new fault, and fewer is progress that has to be written down with

    UPDATE_RATCHETS=1 pytest -n 0 tests/repo

which refuses to let the total of a guard grow, unless `RAISE=1` is set too.
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
"""Offenders that a failed check lists."""


def tracked(*endings: str) -> list[Path]:
    """Return the files that git tracks or would, with one of some endings, below the repository's root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    return [Path(name) for name in sorted(set(names)) if name.endswith(endings) and (ROOT / name).is_file()]


def check(name: str, counts: Mapping[str, int], places: Sequence[str] = ()) -> None:
    """Compare a guard's counts with those written down; `places` says where the offenders are.

    Raises:
        AssertionError: an offender is new, worse, better or gone.
    """
    counts = {key: count for key, count in sorted(counts.items()) if count}
    if os.environ.get("UPDATE_RATCHETS"):
        _update(name, counts)
        return
    known: dict[str, int] = _load().get(name, {})
    worse = [
        f"{key}: {count}, {known.get(key, 0)} known"
        for key, count in counts.items()
        if count > known.get(key, 0)
    ]
    better = [
        f"{key}: {counts.get(key, 0)}, {count} known"
        for key, count in known.items()
        if count > counts.get(key, 0)
    ]
    lines = []
    if worse:
        lines += [f"{name}: {len(worse)} new or worse", *worse, "", "where they are:", *_some(places)]
    if better:
        lines += [f"{name}: fewer than written down; UPDATE_RATCHETS=1 pytest -n 0 tests/repo", *better]
    assert not lines, "\n".join(lines)


def _some(lines: Sequence[str]) -> list[str]:
    more = len(lines) - MAX_SHOWN
    return [*lines[:MAX_SHOWN], *([f"... and {more} more"] if more > 0 else [])]


def _load() -> dict[str, dict[str, int]]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def _update(name: str, counts: dict[str, int]) -> None:
    with FILE.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # other processes of the same run write the counts of other guards
        file.seek(0)
        text = file.read()
        ratchets = json.loads(text) if text else {}
        old, new = sum(ratchets.get(name, {}).values()), sum(counts.values())
        if new > old and name in ratchets and not os.environ.get("RAISE"):
            raise AssertionError(f"{name} would grow from {old} to {new}; RAISE=1 lets it")
        ratchets[name] = counts
        file.seek(0)
        file.truncate()
        file.write(json.dumps(ratchets, indent=1, sort_keys=True) + "\n")
