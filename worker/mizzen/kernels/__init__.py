"""Mizzen's own kernels in Triton and CUDA C++; each fuses several plain operations into one pass.

The plain operations remain next to them in the layers, the sampler and the step: they run on the CPU, and
wherever fusion is off. Only the modules of this package import Triton, and they are imported only where a
model is built for a GPU.
"""

from __future__ import annotations

import os


def set_compiler_cache_dirs() -> None:
    """Make Triton and FlashInfer cache compiled kernels in $MIZZEN_CACHE_DIR, unless their own variables are
    set.

    Call it before either is imported.
    """
    if folder := os.environ.get("MIZZEN_CACHE_DIR"):
        os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(folder, "triton"))
        os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", folder)


set_compiler_cache_dirs()
