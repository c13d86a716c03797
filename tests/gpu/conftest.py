# SPDX-License-Identifier: Apache-2.0
"""Makes helper modules importable, and reports missing packages where no test may be skipped."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # Before the import of PyTorch, whose threads of all workers would otherwise wait for each other's cores.
    threads = max(1, (os.cpu_count() or 1) // int(workers))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))

import torch

HERE = Path(__file__).parent
ENGINE_TESTS = HERE.parent / "engine"
HELPER_FOLDERS = (
    HERE,
    *(HERE / name for name in ("attention", "engine", "images", "kernels", "parallel")),
    ENGINE_TESTS,
    ENGINE_TESTS / "images",
    HERE.parents[1] / "benchmarks",
)
"""Folders with helper modules of the tests."""
sys.path[:0] = [*map(str, HELPER_FOLDERS)]

PACKAGES = ("cuda.bindings", "flashinfer", "sgl_kernel", "transformers", "triton", "xgrammar")
"""Packages whose absence would skip tests or select slower kernels."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """With MIZZEN_GPU=required, as in `make test-gpu`, exit if a GPU or one of PACKAGES is missing."""
    if os.environ.get("MIZZEN_GPU") != "required":
        return
    if not torch.cuda.is_available():
        pytest.exit("these tests need a GPU, and PyTorch finds none", returncode=2)
    lacking = [name for name in PACKAGES if not is_importable(name)]
    if lacking:
        pytest.exit(
            f"these tests need the packages of mizzen[gpu]; missing: {', '.join(lacking)}", returncode=2
        )


def is_importable(name: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Qwen3 in bfloat16; some test files have a model of their own."""
    from small_models import make_model

    folder = tmp_path_factory.mktemp("qwen3")
    make_model("qwen3").bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the buffers of kernels with NaN or large numbers, so that whatever is not written shows."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        buffer = empty(*size, **options)
        return buffer.fill_(float("nan") if buffer.is_floating_point() else 1 << 20)

    monkeypatch.setattr(torch, "empty", poisoned)
