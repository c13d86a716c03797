"""Kernels of our own in Triton and CUDA C++; each does what a few plain operations do, in one pass.

The plain operations stay beside them in the layers, the sampler and the step: they run on the CPU, and
wherever fusion is off. Triton is imported by the modules of this package alone, which are imported where a
model is built for a GPU.
"""

from __future__ import annotations

import os


def set_compiler_cache_dirs() -> None:
    """Let Triton and FlashInfer keep what they compile in $MIZZEN_CACHE_DIR, unless they are told where.

    Called before either is imported.
    """
    if folder := os.environ.get("MIZZEN_CACHE_DIR"):
        os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(folder, "triton"))
        os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", folder)


set_compiler_cache_dirs()
