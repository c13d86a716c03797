# SPDX-License-Identifier: Apache-2.0
"""Marks for tests that need a Hopper GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def on_hopper(module: str, package: str) -> list[pytest.MarkDecorator]:
    """Return the `pytestmark` of a file whose tests need a Hopper GPU and a package."""
    available = HOPPER and importlib.util.find_spec(module) is not None
    return [pytest.mark.gpu, pytest.mark.skipif(not available, reason=f"needs a Hopper GPU with {package}")]


WITH_FA3 = on_hopper("sgl_kernel", "sglang-kernel")
"""Marks of files whose tests run FlashAttention 3."""
