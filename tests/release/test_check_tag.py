# SPDX-License-Identifier: Apache-2.0
"""A tag is released only if it is the version, and if images can be pushed to the configured registry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mizzen

SCRIPT = Path(__file__).parents[2] / "scripts/release/check_tag.sh"
TAG = f"v{mizzen.__version__}"


def check(tag: str, registry: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [SCRIPT, tag, registry],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "registry", ["registry.example.com/team", "Registry.Example.com:5000/a/b", "registry.example.com"]
)
def test_the_version_can_be_released(registry: str) -> None:
    assert check(TAG, registry).returncode == 0


@pytest.mark.parametrize(
    ("tag", "registry", "message"),
    [
        ("v99.0.0", "registry.example.com/team", "the tag is v99.0.0, but the files have version"),
        (TAG, "", "set the repository's variable REGISTRY"),
        (TAG, "/owner", "set the repository's variable REGISTRY"),
        (TAG, "registry.example.com/Team", "registry.example.com/Team has upper-case letters"),
        (TAG, "registry.example.com/a/teaM", "set the variable REGISTRY"),
    ],
)
def test_the_reason_of_a_refusal_is_printed(tag: str, registry: str, message: str) -> None:
    checked = check(tag, registry)
    assert checked.returncode == 1
    assert message in checked.stderr
