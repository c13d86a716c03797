# SPDX-License-Identifier: Apache-2.0
"""The Makefile's GPU targets put this checkout first on PYTHONPATH, and keep its previous entries."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("old_path", "path"),
    [("/extra", "worker:operator:/extra"), ("", "worker:operator"), (None, "worker:operator")],
)
@pytest.mark.parametrize("target", ["bench-gpu", "test-gpu"])
def test_gpu_targets_extend_pythonpath(target: str, old_path: str | None, path: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {} if old_path is None else {"PYTHONPATH": old_path}
    command = ["make", "--silent", target, "GPU_PYTHON=printenv PYTHONPATH #"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == f"{path}\n"
