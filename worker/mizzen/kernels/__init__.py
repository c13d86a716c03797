# SPDX-License-Identifier: Apache-2.0
"""Mizzen's own kernels in Triton and CUDA C++; each fuses several plain operations into one pass.

The unfused PyTorch code remains in the layers, the sampler and the step; it runs on the CPU, and on GPUs
whenever kernel fusion is off. Only modules of this package import Triton, and they are imported only when a
model is built for a GPU.
"""

from __future__ import annotations

import os


def set_compiler_cache_dirs() -> None:
    """Make Triton and FlashInfer cache compiled kernels in $MIZZEN_CACHE_DIR, if that is set.

    Environment variables of Triton and FlashInfer that are already set are kept. Call this before either
    package is imported.
    """
    if folder := os.environ.get("MIZZEN_CACHE_DIR"):
        os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(folder, "triton"))
        os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", folder)


set_compiler_cache_dirs()
