"""One variable says where all compiled kernels are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mizzen.kernels import set_compiler_cache_dirs
from mizzen.kernels.nvrtc import cache_dir


def test_all_compilers_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIZZEN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/elsewhere")
    set_compiler_cache_dirs()
    assert cache_dir() == tmp_path
    assert os.environ["TRITON_CACHE_DIR"] == f"{tmp_path}/triton"
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == "/elsewhere"  # who says so is not overruled


def test_without_it_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIZZEN_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.delenv(name, raising=False)
    set_compiler_cache_dirs()
    assert "TRITON_CACHE_DIR" not in os.environ and "FLASHINFER_WORKSPACE_BASE" not in os.environ
