"""What `auto` makes of a device, with and without the packages that backends need."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mizzen.attention import fa3, flashinfer, split
from mizzen.attention.base import Geometry
from mizzen.attention.registry import choose

HOPPER, AMPERE = (9, 0), (8, 0)


def kv(dtype: torch.dtype = torch.bfloat16) -> Any:
    return SimpleNamespace(
        keys=SimpleNamespace(device=torch.device("cuda"), dtype=dtype), quantized=dtype.itemsize == 1
    )


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    packages: set[str],
    cache: Any = None,
    head_dim: int = 128,
    compiler: str | None = None,
    heads: int = 8,
) -> tuple[str, str]:
    """Return what decodes and prompts get."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for module in (fa3, flashinfer):
        monkeypatch.setattr(
            module.importlib.util, "find_spec", lambda name: name if name in packages else None
        )
    monkeypatch.setattr(flashinfer.shutil, "which", lambda name: compiler)
    geometry = Geometry(heads=heads, kv_heads=2, head_dim=head_dim, windows=(None,))
    return (
        choose("auto", geometry, cache or kv(), decode=True),
        choose("auto", geometry, cache or kv(), decode=False),
    )


BOTH = {"sgl_kernel", "flashinfer", "flashinfer_jit_cache"}


def test_our_own_kernel_and_fa3_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, HOPPER, BOTH) == ("split", "fa3")
    assert chosen(monkeypatch, HOPPER, BOTH, kv(torch.float8_e4m3fn)) == ("split", "fa3")


def test_heads_that_our_kernel_does_not_serve_go_to_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, HOPPER, BOTH, head_dim=96) == ("fa3", "fa3")
    assert "not 96" in str(split.missing(Geometry(heads=8, kv_heads=2, head_dim=96, windows=(None,)), kv()))


def test_many_query_heads_of_a_kv_head_go_to_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, HOPPER, BOTH, heads=32) == ("fa3", "fa3")
    assert chosen(monkeypatch, HOPPER, BOTH, heads=16) == ("split", "fa3")
    assert chosen(monkeypatch, HOPPER, BOTH, kv(torch.float8_e4m3fn), heads=32) == ("split", "fa3")
    assert chosen(monkeypatch, AMPERE, BOTH, heads=32) == ("split", "flashinfer")


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
    assert "flashinfer-jit-cache, or nvcc" in caplog.text
    assert chosen(monkeypatch, AMPERE, {"flashinfer"}, compiler="/usr/bin/nvcc") == ("split", "flashinfer")


def test_full_precision_runs_by_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, HOPPER, BOTH, kv(torch.float32)) == ("reference", "reference")
