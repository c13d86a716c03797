# SPDX-License-Identifier: Apache-2.0
"""Marks and device of tests that run Triton kernels: on a GPU, or in Triton's interpreter
(TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32
"""Data type of most inputs; the interpreter computes in float32, without the rounding errors of bfloat16."""
RUNS_TRITON = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device"),
]
"""The `pytestmark` of a file with such tests."""
