# SPDX-License-Identifier: Apache-2.0
"""A small model of Transformers, saved to the folder of a test."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def model(kit: SimpleNamespace, tmp_path: Path) -> Any:
    return kit.save_model(tmp_path, "qwen3", seed=3)
