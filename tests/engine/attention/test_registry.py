# SPDX-License-Identifier: Apache-2.0
"""The choice of attention backends by device, and the errors for unsupported choices."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mizzen.attention import flash_attention3, flash_decode, flashinfer
from mizzen.attention.base import Geometry, KVSpec
from mizzen.attention.registry import check_backends, select_backend

HOPPER, AMPERE = (9, 0), (8, 0)


def kv(dtype: torch.dtype = torch.bfloat16) -> KVSpec:
    return KVSpec(torch.device("cuda"), dtype)


def fake_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    packages: set[str],
    compiler: str | None = None,
    folder: Path = Path("/nowhere"),
) -> None:
    """Simulate a GPU of the given compute capability.

    Args:
        packages: names of the importable packages; they lie in `folder`.
        compiler: path of nvcc; None if there is no compiler.
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    for module in (flash_attention3, flashinfer):
        monkeypatch.setattr(
            module.importlib.util, "find_spec", lambda name: spec if name in packages else None
        )
    monkeypatch.setitem(sys.modules, flash_attention3.PACKAGE, ModuleType(flash_attention3.PACKAGE))
    for name in ("FLASHINFER_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(flashinfer.shutil, "which", lambda name: compiler if name == compiler else None)


def selected(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    packages: set[str],
    cache: KVSpec | None = None,
    head_dim: int = 128,
    heads: int = 8,
    has_sinks: bool = False,
    **machine: str,
) -> tuple[str, str]:
    """Return the backends that `auto` selects for decodes and prefills."""
    fake_gpu(monkeypatch, capability, packages, **machine)
    geometry = Geometry(heads=heads, kv_heads=2, head_dim=head_dim, windows=(None,), has_sinks=has_sinks)
    return (
        select_backend("auto", geometry, cache or kv(), decode=True),
        select_backend("auto", geometry, cache or kv(), decode=False),
    )


BOTH = {"sgl_kernel", "flashinfer", "flashinfer_jit_cache"}


def test_hopper_uses_flash_decode_and_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selected(monkeypatch, HOPPER, BOTH) == ("split", "fa3")
    assert selected(monkeypatch, HOPPER, BOTH, kv(torch.float8_e4m3fn)) == ("split", "fa3")


def test_head_dims_without_flash_decode_use_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selected(monkeypatch, HOPPER, BOTH, head_dim=96) == ("fa3", "fa3")
    assert "not 96" in str(
        flash_decode.unsupported_reason(Geometry(heads=8, kv_heads=2, head_dim=96, windows=(None,)), kv())
    )


def test_large_gqa_groups_use_fa3_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selected(monkeypatch, HOPPER, BOTH, heads=32) == ("fa3", "fa3")
    assert selected(monkeypatch, HOPPER, BOTH, heads=16) == ("split", "fa3")
    assert selected(monkeypatch, HOPPER, BOTH, kv(torch.float8_e4m3fn), heads=32) == ("split", "fa3")
    assert selected(monkeypatch, AMPERE, BOTH, heads=32) == ("split", "flashinfer")


def test_attention_sinks_exclude_only_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selected(monkeypatch, HOPPER, BOTH, heads=16, has_sinks=True) == ("split", "fa3")
    assert selected(monkeypatch, HOPPER, BOTH, heads=32, has_sinks=True) == ("fa3", "fa3")
    assert selected(monkeypatch, AMPERE, BOTH, heads=16, has_sinks=True) == ("split", "reference")


def test_kernels_built_for_another_pytorch_are_skipped_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    broken = 'raise OSError("flash_ops.so: undefined symbol: _ZN5torch7Library4_def\\nand more")'
    (tmp_path / "sgl_kernel" / "__init__.py").write_text(broken)
    fake_gpu(monkeypatch, HOPPER, BOTH)
    monkeypatch.delitem(sys.modules, flash_attention3.PACKAGE)
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    geometry = Geometry(heads=8, kv_heads=2, head_dim=128, windows=(None,))
    assert select_backend("auto", geometry, kv(), decode=False) == "flashinfer"
    reason = flash_attention3.unsupported_reason(geometry, kv())
    assert reason is not None and reason.endswith("(flash_ops.so: undefined symbol: _ZN5torch7Library4_def)")
    assert f"built for PyTorch {torch.__version__}" in reason


@pytest.mark.parametrize(("capability", "packages"), [(AMPERE, BOTH), (HOPPER, BOTH - {"sgl_kernel"})])
def test_prefills_use_flashinfer_without_fa3(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], packages: set[str]
) -> None:
    assert selected(monkeypatch, capability, packages) == ("split", "flashinfer")


def test_flashinfer_without_kernels_or_compiler_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert selected(monkeypatch, AMPERE, {"flashinfer"}) == ("split", "reference")
    assert "fa3 does not run here: it needs a Hopper GPU; flashinfer does not run here" in caplog.text
    assert "its kernels are not compiled, and there is no nvcc" in caplog.text
    assert selected(monkeypatch, AMPERE, {"flashinfer"}, compiler="nvcc") == ("split", "flashinfer")


GEOMETRY = Geometry(heads=8, kv_heads=2, head_dim=128, windows=(None,))


@pytest.mark.parametrize("option", ["--attention-prefill", "--attention-decode"])
@pytest.mark.parametrize("name", ["flashinfer", "flashinfer-fa3"])
def test_choosing_flashinfer_without_kernels_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, option: str
) -> None:
    fake_gpu(monkeypatch, HOPPER, {"flashinfer", "sgl_kernel"})
    names = {"prefill": "auto", "decode": "auto"} | {option.removeprefix("--attention-"): name}
    words = rf"{option} {name} does not run here: its kernels are not compiled.*flashinfer-jit-cache"
    with pytest.raises(ValueError, match=words):
        check_backends(GEOMETRY, kv(), **names)
    fake_gpu(monkeypatch, HOPPER, BOTH)
    check_backends(GEOMETRY, kv(), **names)


def test_kernels_inside_the_flashinfer_package_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_gpu(monkeypatch, AMPERE, {"flashinfer"}, folder=tmp_path)
    assert not flashinfer.has_compiled_kernels()
    kernel = tmp_path / "data/aot/batch_prefill/batch_prefill.so"
    kernel.parent.mkdir(parents=True)
    kernel.touch()
    assert flashinfer.has_compiled_kernels()


@pytest.mark.parametrize(
    ("variable", "value", "compiler"),
    [
        ("FLASHINFER_NVCC", "/other/nvcc", "/other/nvcc"),
        ("CUDA_HOME", "/cuda", "/cuda/bin/nvcc"),
        ("CUDA_PATH", "/cuda", "/cuda/bin/nvcc"),
        ("", "", "/usr/local/cuda/bin/nvcc"),
    ],
)
def test_the_compiler_search_follows_flashinfers(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, compiler: str
) -> None:
    fake_gpu(monkeypatch, AMPERE, {"flashinfer"}, compiler=compiler)
    if variable:
        assert not flashinfer.has_compiler()
        monkeypatch.setenv(variable, value)
    assert flashinfer.has_compiler()
    fake_gpu(monkeypatch, AMPERE, {"flashinfer"})
    monkeypatch.setenv("CUDA_HOME", "/cuda")
    assert not flashinfer.has_compiler()


@pytest.mark.parametrize(
    ("names", "cache", "words"),
    [
        (
            {"decode": "fa3"},
            KVSpec(torch.device("cpu"), torch.float32),
            "decode fa3 .* needs a Hopper GPU",
        ),
        (
            {"decode": "cpu"},
            kv(),
            "--attention-decode cpu .* needs --device cpu, not cuda; choose reference",
        ),
        ({"prefill": "split"}, kv(), r"supports only decodes: .*\(--attention-prefill\)"),
        ({"decode": "flashinfer-fa3"}, kv(torch.float8_e4m3fn), "bfloat16 or float16, not float8_e4m3fn"),
        ({"prefill": "fa3"}, kv(torch.float32), "--attention-prefill fa3 .* float8, not float32"),
    ],
)
def test_choosing_an_unsupported_backend_is_an_error(
    monkeypatch: pytest.MonkeyPatch, names: dict[str, str], cache: KVSpec, words: str
) -> None:
    fake_gpu(monkeypatch, HOPPER, BOTH)
    with pytest.raises(ValueError, match=words):
        check_backends(GEOMETRY, cache, **{"prefill": "auto", "decode": "auto", **names})


def test_float32_uses_the_reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selected(monkeypatch, HOPPER, BOTH, kv(torch.float32)) == ("reference", "reference")


def documented_backends() -> dict[tuple[int, int], tuple[str, str, str, str]]:
    """Return the backends in the table of docs/gpus.md by compute capability.

    The order is decode, prefill, decode with an FP8 KV cache, and prefill with an FP8 KV cache.
    """
    page = (Path(__file__).parents[3] / "docs/gpus.md").read_text()
    rows = re.findall(r"^\| (\d+)\.(\d) \|[^|]+\|(.+)\|$", page, re.MULTILINE)
    names = {(int(major), int(minor)): re.findall(r"`(\S+)`", cells) for major, minor, cells in rows}
    return {capability: (a, b, c, d) for capability, (a, b, c, d) in names.items()}


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_the_guide_lists_the_backends_of_the_engine_image(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image contains sglang-kernel, but neither FlashInfer's kernels nor a compiler for them."""
    packages = {"sgl_kernel"}
    expected = documented_backends()[capability]
    assert selected(monkeypatch, capability, packages) == expected[:2]
    assert selected(monkeypatch, capability, packages, kv(torch.float8_e4m3fn)) == expected[2:]


def test_the_guide_lists_each_compute_capability_once() -> None:
    assert sorted(documented_backends()) == [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
