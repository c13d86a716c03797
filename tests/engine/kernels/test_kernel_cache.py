# SPDX-License-Identifier: Apache-2.0
"""The cache of compiled kernels: the choice of its folder, and the safety of its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mizzen.kernels import nvrtc, set_compiler_cache_dirs
from mizzen.kernels.nvrtc import cache_dir, load_or_compile_cubin

HOPPER = (9, 0)


def test_all_compilers_share_the_folder_of_one_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIZZEN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/elsewhere")
    set_compiler_cache_dirs()
    assert cache_dir() == tmp_path
    assert os.environ["TRITON_CACHE_DIR"] == f"{tmp_path}/triton"
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == "/elsewhere"  # an explicit setting wins


def test_without_the_variable_the_compilers_keep_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIZZEN_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.delenv(name, raising=False)
    set_compiler_cache_dirs()
    assert "TRITON_CACHE_DIR" not in os.environ and "FLASHINFER_WORKSPACE_BASE" not in os.environ


def compile_gemv(source_suffix: str = "") -> bytes:
    """Load or compile a GEMV kernel."""
    pytest.importorskip("cuda.bindings", reason="this PyTorch comes without CUDA's bindings")
    pytest.importorskip("triton", reason="this PyTorch comes without Triton")
    from mizzen.kernels.gemm import gemv

    defines = gemv.compile_definitions(256, swiglu=False, norm=False, add=False)
    return load_or_compile_cubin(gemv.SOURCE + source_suffix, "gemv", defines, HOPPER)


def test_a_kernel_is_compiled_once_and_again_if_its_file_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIZZEN_CACHE_DIR", str(tmp_path / "cache"))
    compilations: list[str] = []
    compile_cubin = nvrtc.compile_cubin
    monkeypatch.setattr(
        nvrtc, "compile_cubin", lambda *args: (compilations.append(args[1]), compile_cubin(*args))[1]
    )
    cubin = compile_gemv()
    (path,) = (tmp_path / "cache" / "kernels").iterdir()
    intact = path.read_bytes()
    assert (compile_gemv(), len(compilations)) == (cubin, 1)
    for damaged in (b"", intact[:-1], intact[:20], intact + b"more", intact[:-1] + b"?"):
        path.write_bytes(damaged)
        before = len(compilations)
        assert (compile_gemv(), compile_gemv(), len(compilations)) == (cubin, cubin, before + 1)
        assert path.read_bytes() == intact
    before = len(compilations)
    compile_gemv(" ")
    assert len(compilations) == before + 1


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("MIZZEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "replace", replace)
    assert compile_gemv()
    assert not list((tmp_path / "kernels").iterdir())


def test_kernels_compile_even_if_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MIZZEN_CACHE_DIR", str(tmp_path / "file"))
    assert compile_gemv()
