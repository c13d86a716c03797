"""What `auto` makes of a device, with and without the packages that backends need."""

from __future__ import annotations

import logging
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


def place(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    packages: set[str],
    compiler: str | None = None,
    folder: Path = Path("/nowhere"),
) -> None:
    """Pretend to be on a GPU, with packages (in `folder`) and a compiler, or none."""
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


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    packages: set[str],
    cache: KVSpec | None = None,
    head_dim: int = 128,
    heads: int = 8,
    **there: str,
) -> tuple[str, str]:
    """Return what decodes and prompts get."""
    place(monkeypatch, capability, packages, **there)
    geometry = Geometry(heads=heads, kv_heads=2, head_dim=head_dim, windows=(None,))
    return (
        select_backend("auto", geometry, cache or kv(), decode=True),
        select_backend("auto", geometry, cache or kv(), decode=False),
    )


BOTH = {"sgl_kernel", "flashinfer", "flashinfer_jit_cache"}


def test_our_own_kernel_and_fa3_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, HOPPER, BOTH) == ("split", "fa3")
    assert chosen(monkeypatch, HOPPER, BOTH, kv(torch.float8_e4m3fn)) == ("split", "fa3")


def test_heads_that_our_kernel_does_not_serve_go_to_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, HOPPER, BOTH, head_dim=96) == ("fa3", "fa3")
    assert "not 96" in str(
        flash_decode.unsupported_reason(Geometry(heads=8, kv_heads=2, head_dim=96, windows=(None,)), kv())
    )


def test_many_query_heads_of_a_kv_head_go_to_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, HOPPER, BOTH, heads=32) == ("fa3", "fa3")
    assert chosen(monkeypatch, HOPPER, BOTH, heads=16) == ("split", "fa3")
    assert chosen(monkeypatch, HOPPER, BOTH, kv(torch.float8_e4m3fn), heads=32) == ("split", "fa3")
    assert chosen(monkeypatch, AMPERE, BOTH, heads=32) == ("split", "flashinfer")


def test_kernels_of_another_pytorch_are_passed_over_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    broken = 'raise OSError("flash_ops.so: undefined symbol: _ZN5torch7Library4_def\\nand more")'
    (tmp_path / "sgl_kernel" / "__init__.py").write_text(broken)
    place(monkeypatch, HOPPER, BOTH)
    monkeypatch.delitem(sys.modules, flash_attention3.PACKAGE)
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    geometry = Geometry(heads=8, kv_heads=2, head_dim=128, windows=(None,))
    assert select_backend("auto", geometry, kv(), decode=False) == "flashinfer"
    why = flash_attention3.unsupported_reason(geometry, kv())
    assert why is not None and why.endswith("(flash_ops.so: undefined symbol: _ZN5torch7Library4_def)")
    assert f"built for PyTorch {torch.__version__}" in why


@pytest.mark.parametrize(("capability", "packages"), [(AMPERE, BOTH), (HOPPER, BOTH - {"sgl_kernel"})])
def test_flashinfer_where_fa3_does_not_run(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], packages: set[str]
) -> None:
    assert chosen(monkeypatch, capability, packages) == ("split", "flashinfer")


def test_nothing_is_chosen_that_could_not_be_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert chosen(monkeypatch, AMPERE, {"flashinfer"}) == ("split", "reference")
    assert "fa3 does not run here: it needs a Hopper GPU; flashinfer does not run here" in caplog.text
    assert "its kernels are not compiled, and no nvcc is here" in caplog.text
    assert chosen(monkeypatch, AMPERE, {"flashinfer"}, compiler="nvcc") == ("split", "flashinfer")


GEOMETRY = Geometry(heads=8, kv_heads=2, head_dim=128, windows=(None,))


@pytest.mark.parametrize("option", ["--attention-prefill", "--attention-decode"])
@pytest.mark.parametrize("name", ["flashinfer", "flashinfer-fa3"])
def test_a_chosen_flashinfer_without_kernels_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, option: str
) -> None:
    place(monkeypatch, HOPPER, {"flashinfer", "sgl_kernel"})
    names = {"prefill": "auto", "decode": "auto"} | {option.removeprefix("--attention-"): name}
    words = rf"{option} {name} does not run here: its kernels are not compiled.*flashinfer-jit-cache"
    with pytest.raises(ValueError, match=words):
        check_backends(GEOMETRY, kv(), **names)
    place(monkeypatch, HOPPER, BOTH)
    check_backends(GEOMETRY, kv(), **names)


def test_kernels_that_the_package_brings_are_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place(monkeypatch, AMPERE, {"flashinfer"}, folder=tmp_path)
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
def test_a_compiler_is_looked_for_where_flashinfer_does(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, compiler: str
) -> None:
    place(monkeypatch, AMPERE, {"flashinfer"}, compiler=compiler)
    if variable:
        assert not flashinfer.has_compiler()
        monkeypatch.setenv(variable, value)
    assert flashinfer.has_compiler()
    place(monkeypatch, AMPERE, {"flashinfer"})
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
        ({"prefill": "split"}, kv(), r"serves decodes alone: .*\(--attention-prefill\)"),
        ({"decode": "flashinfer-fa3"}, kv(torch.float8_e4m3fn), "bfloat16 or float16, not float8_e4m3fn"),
        ({"prefill": "fa3"}, kv(torch.float32), "--attention-prefill fa3 .* float8, not float32"),
    ],
)
def test_a_choice_that_cannot_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, names: dict[str, str], cache: KVSpec, words: str
) -> None:
    place(monkeypatch, HOPPER, BOTH)
    with pytest.raises(ValueError, match=words):
        check_backends(GEOMETRY, cache, **{"prefill": "auto", "decode": "auto", **names})


def test_full_precision_runs_by_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, HOPPER, BOTH, kv(torch.float32)) == ("reference", "reference")
