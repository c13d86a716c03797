# SPDX-License-Identifier: Apache-2.0
"""Marks for tests that need a Hopper GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from mizzen.attention.flash_attention3 import package_fault

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def on_hopper(module: str, package: str) -> list[pytest.MarkDecorator]:
    """Return the `pytestmark` of a file whose tests need a Hopper GPU and a package."""
    available = HOPPER and importlib.util.find_spec(module) is not None
    return [pytest.mark.gpu, pytest.mark.skipif(not available, reason=f"needs a Hopper GPU with {package}")]


FA3_FAULT = package_fault() if HOPPER else "no Hopper GPU"
WITH_FA3 = [
    pytest.mark.gpu,
    pytest.mark.skipif(FA3_FAULT is not None, reason=f"needs FlashAttention 3: {FA3_FAULT}"),
]
"""Marks of files whose tests run FlashAttention 3."""
