"""Marks of tests that need a Hopper GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
WITH_FA3 = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not HOPPER or importlib.util.find_spec("sgl_kernel") is None,
        reason="needs a Hopper GPU with sglang-kernel",
    ),
]
"""Of files whose tests run FlashAttention 3: `pytestmark`."""
