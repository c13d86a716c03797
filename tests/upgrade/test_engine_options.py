# SPDX-License-Identifier: Apache-2.0
"""An operator of this release creates pods of engines of the previous one, whose options these engines know.

It does so for services whose `spec.engine.image` is pinned, and for groups of an earlier revision. An engine
that gets an unknown option exits, so the operator may pass a new option only for a new field of the spec that
is set. A setting that specs of the previous release could have must reach engines in another way, such as an
environment variable.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from previous_release import CURRENT, Release

CHILDREN = CURRENT.root / "tests" / "golden" / "data" / "operator_children.json"


def containers(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the containers of engines in a JSON value."""
    if isinstance(value, dict):
        if value.get("name") == "engine" and "args" in value:
            yield value
        for part in value.values():
            yield from containers(part)
    elif isinstance(value, list):
        for part in value:
            yield from containers(part)


def test_engines_of_the_previous_release_know_their_options(previous: Release, tmp_path: Path) -> None:
    help_text = subprocess.run(
        [*previous.command("mizzen.cli"), "engine", "--help"],
        env={**previous.environment, "COLUMNS": "200"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    known = set(re.findall(r"(--[a-z][a-z0-9-]+)", help_text))
    passed = [
        word
        for container in containers(json.loads(CHILDREN.read_text()))
        for word in container["args"]
        if word.startswith("--")
    ]
    assert len(passed) > 100
    assert set(passed) <= known
