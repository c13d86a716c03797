# SPDX-License-Identifier: Apache-2.0
"""FlashInfer kernels for tests: `need` skips a test whose kernel is not compiled.

With MIZZEN_COMPILE=1, `need` skips no test; instead, its first call compiles all kernels.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

HEAD_DIMS = (64, 128, 256)
TEMPLATES = ("fa2", "fa3")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def specification(template: str, head_dim: int, window: bool, stored: torch.dtype = BF16) -> Any:
    from flashinfer.jit.attention import gen_batch_prefill_module

    return gen_batch_prefill_module(
        template, BF16, stored, BF16, torch.int32, head_dim, head_dim, 0, window, False, False
    )


@functools.cache
def compile_all() -> None:
    specs = [
        specification(template, head_dim, window)
        for template in TEMPLATES
        for head_dim in HEAD_DIMS
        for window in (False, True)
    ]
    specs += [specification("fa2", 128, True, FP8)]
    specs += [specification("fa2", head_dim, False, FP8) for head_dim in HEAD_DIMS]
    # One ninja process per kernel, as on first use. A common ninja run would leave no log in the folder of
    # each kernel, and the first use would compile it again.
    with ThreadPoolExecutor(len(specs)) as pool:
        list(pool.map(lambda spec: spec.is_compiled or spec.build(verbose=False), specs))


def need(template: str, head_dim: int, window: bool, stored: torch.dtype = BF16) -> None:
    if os.environ.get("MIZZEN_COMPILE"):
        compile_all()
        return
    spec = specification(template, head_dim, window, stored)
    if not spec.is_aot and not spec.is_compiled:
        pytest.skip("FlashInfer's kernels are not compiled; MIZZEN_COMPILE=1 compiles them")
