# SPDX-License-Identifier: Apache-2.0
"""Imitates installations with some extras: modules of all other distributions cannot be imported."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from built_distribution import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BLOCK = """
import sys
class Filter:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Filter(finder) for finder in sys.meta_path]
"""


@functools.cache
def required(extras: str) -> frozenset[str]:
    """Return the names of all distributions that `mizzen[extras]` installs, from the installed metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(line) for line in project["dependencies"]]
    for extra in filter(None, extras.split(",")):
        waiting += [Requirement(line) for line in project["optional-dependencies"][extra]]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in found:
            continue
        found.add(key)
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # needed only on another platform
            continue
        for line in lines:
            needed = Requirement(line)
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
            ):
                waiting.append(needed)
    return frozenset(name for name, _ in found)


@functools.cache
def blocked_modules(extras: str) -> list[str]:
    """Return the names of installed top-level modules that an installation of `mizzen[extras]` lacks."""
    kept = {*required(extras), "mizzen"}
    modules = importlib.metadata.packages_distributions()
    return sorted(
        module
        for module, owners in modules.items()
        if not {canonicalize_name(owner) for owner in owners} & kept
    )


def run_with(
    extras: str, code: str, arguments: Sequence[str] = (), folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python code as if only `mizzen[extras]` were installed."""
    program = f"BLOCKED = {set(blocked_modules(extras))!r}\n{BLOCK}\n{code}"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/worker:{ROOT}/operator", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
