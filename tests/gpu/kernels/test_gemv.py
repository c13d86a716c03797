# SPDX-License-Identifier: Apache-2.0
"""GEMV equals PyTorch's, alone and in a chain of overlapping kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gemm_kit import check_replays, normal

from mizzen.kernels.gemm.gemv import PreNorm, gemv, supports
from mizzen.kernels.norm import add_rms_norm, rms_norm
from mizzen.kernels.swiglu import gate_mul

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9,
        reason="needs a Hopper GPU",
    ),
]


@pytest.mark.parametrize("columns", [8, 136, 1024, 2048, 3072, 4096, 8192, 12288, 14336, 17408, 25600, 32768])
@pytest.mark.parametrize("rows", [1, 13, 4096])
def test_gemv_equals_the_exact_product(rows: int, columns: int) -> None:
    weight = normal(rows, columns)
    assert supports(weight)
    x = normal(1, columns, seed=1)
    expected = x.double() @ weight.double().T
    out = torch.full((1, rows), float("nan"), dtype=torch.bfloat16, device="cuda")
    for actual in (gemv(weight, x), gemv(weight, x, out)):
        assert (actual.double() - expected).norm() < 4e-3 * expected.norm() + 1e-3


@pytest.mark.parametrize("columns", [8, 136, 1024, 2880, 4096, 17408, 32768])
@pytest.mark.parametrize("rows", [1, 13, 5120])
def test_gemv_adds_the_bias_before_rounding(rows: int, columns: int) -> None:
    weight, x, bias = normal(rows, columns), normal(1, columns, seed=1), normal(rows, seed=2) * columns**0.5
    out = torch.full((1, rows), float("nan"), dtype=torch.bfloat16, device="cuda")
    exact = x.double() @ weight.double().T + bias.double()
    for actual in (gemv(weight, x, bias=bias), gemv(weight, x, out, bias=bias)):
        assert (actual.double() - exact).norm() < 2.5e-3 * exact.norm() + 1e-3


def test_gemv_fuses_norm_and_bias() -> None:
    weight, bias = normal(2570, 2048) / 45, normal(2570, seed=4)
    x, residual, scale = normal(1, 2048, seed=1), normal(1, 2048, seed=2), normal(2048, seed=3)
    total, new_residual = residual.clone(), torch.full_like(x, float("nan"))
    expected = add_rms_norm(x, total, scale, 1e-6).double() @ weight.double().T + bias.double()
    norm = PreNorm(scale=scale, epsilon=1e-6, residual=residual)
    actual = gemv(weight, x, norm=norm, new_residual=new_residual, bias=bias)
    assert (actual.double() - expected).norm() < 4e-3 * expected.norm()
    assert torch.equal(new_residual, total)


def test_swiglu_excludes_a_bias() -> None:
    weight = normal(16, 64)
    with pytest.raises(ValueError, match="cannot have a bias"):
        gemv(weight, normal(1, 64), swiglu=True, bias=normal(16))


@pytest.mark.parametrize("columns", [1024, 2048, 4096, 5120])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_gemv_fuses_norm_and_swiglu(columns: int, gate: bool, add: bool) -> None:
    weight = normal(2050, columns) / columns**0.5
    x, residual, scale = normal(1, columns, seed=1), normal(1, columns, seed=2), normal(columns, seed=3)
    total = residual.clone()
    plain = add_rms_norm(x, total, scale, 1e-6) if add else rms_norm(x, scale, 1e-6)
    expected = gemv(weight, plain)
    expected = gate_mul(expected) if gate else expected
    new_residual = torch.full_like(x, float("nan"))
    norm = PreNorm(scale=scale, epsilon=1e-6, residual=residual if add else None)
    actual = gemv(weight, x, swiglu=gate, norm=norm, new_residual=new_residual if add else None)
    assert (actual.double() - expected.double()).norm() < 4e-3 * expected.double().norm()
    if add:
        assert torch.equal(new_residual, total)
    close = gemv(weight, plain, swiglu=gate)
    assert (close.double() - expected.double()).norm() < 4e-3 * expected.double().norm()


def test_a_chain_of_overlapping_kernels_is_correct() -> None:
    size = 1024
    weights = [normal(size, size, seed=i) / 32 for i in range(40)]
    norm = torch.ones(size, dtype=torch.bfloat16, device="cuda")
    x = normal(1, size, seed=99)
    out = torch.empty_like(x)

    def chain() -> None:
        residual, y = x.clone(), x
        for weight in weights:
            y = gemv(weight, add_rms_norm(y, residual, norm, 1e-6))
        out.copy_(y)

    actual = check_replays(chain, out, 200)
    exact, y = x.float(), x.float()
    for weight in weights:
        exact = exact + y
        y = F.rms_norm(exact, (size,), norm.float(), 1e-6) @ weight.float().T
    assert (actual.float() - y).norm() < 0.05 * y.norm()
