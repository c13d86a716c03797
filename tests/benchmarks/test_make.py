"""The targets for a GPU run this checkout, and keep what was on the path before."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("before", "path"),
    [("/extra", "worker:operator:/extra"), ("", "worker:operator"), (None, "worker:operator")],
)
@pytest.mark.parametrize("target", ["bench-gpu", "test-gpu"])
def test_the_path_is_added_to(target: str, before: str | None, path: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {} if before is None else {"PYTHONPATH": before}
    command = ["make", "--silent", target, "GPU_PYTHON=printenv PYTHONPATH #"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{path}\n"
