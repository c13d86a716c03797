# SPDX-License-Identifier: Apache-2.0
"""Products with quantized experts equal plain loops, whatever unused memory holds: on a GPU, or in Triton's
interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_device import DEVICE, DTYPE, GPU, RUNS_TRITON

from mizzen.kernels.experts import align, quantized_gemm
from mizzen.layers.experts.quantized_kernel_product import GroupedQuantizedProduct, make_matrices
from mizzen.layers.experts.quantized_stack import QuantizedExperts
from mizzen.layers.quantized.canonical import Codes
from random_weights import make_weight, move_weight

pytestmark = [*RUNS_TRITON, pytest.mark.usefixtures("poisoned_buffers")]
ROUNDING = torch.finfo(DTYPE).eps / 2
"""Largest relative error of rounding to the data type of inputs, dequantized weights and results."""
SUMMING = 128 * torch.finfo(torch.float32).eps
"""Bound of the relative error of sums of at most 96 products in float32."""
TINY = 1e-30
"""Differences that underflow may cause."""
EXPERTS, HIDDEN, WIDTH, PER_TOKEN = 5, 72, 96, 3
NAN = float("nan")
KINDS: dict[str, dict[str, Any]] = {
    "e4m3-channel": {"codes": Codes.E4M3},
    "e4m3-blocks": {"codes": Codes.E4M3, "row_step": 8, "column_step": 32},
    "e4m3-odd-blocks": {"codes": Codes.E4M3, "row_step": 24, "column_step": 40},
    "int8": {"codes": Codes.INT8, "column_step": 24},
    "uint8-zeros": {"codes": Codes.UINT8, "column_step": 32, "zeros": True},
    "uint4": {"codes": Codes.UINT4, "column_step": 32, "dtype": torch.bfloat16},
    "uint4-zeros": {"codes": Codes.UINT4, "column_step": 8, "zeros": True, "dtype": torch.float16},
    "uint4-channel-zeros": {"codes": Codes.UINT4, "zeros": True},
}


def make_experts(kind: str, rows: int, columns: int, *, ordered: bool = False) -> QuantizedExperts:
    weight = make_weight(rows=EXPERTS * rows, columns=columns, **KINDS[kind])
    # Scales are at most 1, but differ by powers of ten, as those of experts in checkpoints.
    weight.scales = (weight.scales.float() / weight.unpack().abs().max() / 3).to(weight.scales.dtype)
    move_weight(weight, DEVICE)
    orders = None
    if ordered:
        generator = torch.Generator().manual_seed(rows)
        orders = torch.stack([torch.randperm(columns, generator=generator) for _ in range(EXPERTS)])
        orders = orders.int().to(DEVICE)
    return QuantizedExperts(weight=weight, rows=rows, orders=orders)


def choose(tokens: int, which: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :PER_TOKEN]
    match which:
        case "one":  # every token chooses the expert 3, two of them more than once
            chosen[:] = torch.tensor([3, 3, 3])
        case "foreign":  # experts of other ranks
            chosen[::2, 1] = EXPERTS
            chosen[0] = EXPERTS
    return chosen.to(DEVICE)


def multiply_exactly(
    inputs: torch.Tensor, errors: torch.Tensor, experts: QuantizedExperts, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products of all pairs, float64 [pairs, rows], and bounds of the errors of a kernel that
    rounds weights and results to `DTYPE`; NaN for pairs of other ranks.

    Inputs are those of each pair, float64 [pairs, columns], and `errors` bound the errors of the kernel's.
    """
    weight, rows = experts.weight.dequantize().double(), experts.rows
    result = torch.full((chosen.numel(), rows), NAN, dtype=torch.float64, device=inputs.device)
    bounds = result.clone()
    for pair, expert in enumerate(chosen.flatten().tolist()):
        if expert < EXPERTS:
            order = slice(None) if experts.orders is None else experts.orders[expert].long()
            own, values, wrong = weight[expert * rows :][:rows], inputs[pair][order], errors[pair][order]
            result[pair] = own @ values
            sizes = own.abs() @ (values.abs() + wrong)
            bound = own.abs() @ wrong + (ROUNDING + SUMMING) * sizes
            bounds[pair] = bound + ROUNDING * (result[pair].abs() + bound)
    return result, bounds


def multiply_rows(
    x: torch.Tensor, experts: QuantizedExperts, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products of all pairs with tokens x [tokens, columns], and their bounds."""
    inputs = x.double().repeat_interleave(PER_TOKEN, 0)
    return multiply_exactly(inputs, torch.zeros_like(inputs), experts, chosen)


def gate_exactly(values: torch.Tensor, errors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return silu(gate) * up for values [pairs, 2 * width], and bounds of its errors in `DTYPE`."""
    (gate, up), (gate_errors, up_errors) = values.chunk(2, 1), errors.chunk(2, 1)
    factor = torch.nn.functional.silu(gate)
    factor_errors = 1.1 * gate_errors  # the derivative of SiLU is less than 1.1
    factor_errors = factor_errors + (ROUNDING + SUMMING) * (factor.abs() + factor_errors)
    result = factor * up
    bounds = factor_errors * (up.abs() + up_errors) + factor.abs() * up_errors
    return result, bounds + ROUNDING * (result.abs() + bounds)


def assert_within(found: torch.Tensor, expected: torch.Tensor, bounds: torch.Tensor) -> None:
    """Check that values differ by less than their bounds, which reach the size of few values."""
    written = ~expected.isnan()
    assert torch.equal(~found.isnan(), written)
    found, expected, bounds = found.double()[written], expected[written], bounds[written] + TINY
    shares = (found - expected).abs() / bounds
    assert (shares < 1).all(), f"errors are up to {shares.max().item():.2f} of their bounds"
    assert not len(bounds) or (bounds < expected.abs() + 2 * TINY).double().mean() > 0.75


def multiply(x: torch.Tensor, experts: QuantizedExperts, chosen: torch.Tensor, block: int) -> torch.Tensor:
    aligned = align.align_pairs(chosen.contiguous(), EXPERTS, block)
    return quantized_gemm.multiply_pairs(x, make_matrices(experts), aligned, chosen.numel(), PER_TOKEN)


def normal(tokens: int, columns: int) -> torch.Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(7)).to(DEVICE, DTYPE)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_pairs_equal_a_plain_loop(kind: str, ordered: bool) -> None:
    experts = make_experts(kind, HIDDEN, WIDTH, ordered=ordered)
    x, chosen = normal(7, WIDTH), choose(7, "foreign")
    assert_within(multiply(x, experts, chosen, 16), *multiply_rows(x, experts, chosen))


@pytest.mark.parametrize("which", ["mixed", "one", "foreign"])
@pytest.mark.parametrize(("tokens", "block"), [(1, 16), (50, 16), (50, 64)])
def test_any_choice_of_experts_is_multiplied(which: str, tokens: int, block: int) -> None:
    experts = make_experts("uint4-zeros", 130, WIDTH)
    x, chosen = normal(tokens, WIDTH), choose(tokens, which)
    assert_within(multiply(x, experts, chosen, block), *multiply_rows(x, experts, chosen))


@pytest.mark.parametrize("kind", ["e4m3-blocks", "uint4-zeros"])
def test_a_row_has_the_same_result_in_any_batch(kind: str) -> None:
    experts = make_experts(kind, HIDDEN, WIDTH)
    x, chosen = normal(40, WIDTH), choose(40, "mixed")
    whole = multiply(x, experts, chosen, 16)
    for tokens in (1, 3, 17):
        part = multiply(x[-tokens:], experts, chosen[-tokens:], 16)
        # The interpreter multiplies by NumPy, whose order of sums depends on the processor and on the row.
        torch.testing.assert_close(
            part, whole[-tokens * PER_TOKEN :], **({"atol": 0, "rtol": 0} if GPU else {})
        )


class FakeWeights:
    """Loaded weights of a mixture."""

    def __init__(self, kind: str) -> None:
        self.gate_up = make_experts(kind, 2 * WIDTH, HIDDEN)
        self.down = make_experts(kind, HIDDEN, WIDTH)


class Silu:
    """The gate of most mixtures."""

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("which", ["mixed", "one", "foreign"])
@pytest.mark.parametrize("kind", ["e4m3-channel", "uint8-zeros"])
def test_products_sum_the_weighted_outputs(kind: str, which: str) -> None:
    weights: Any = FakeWeights(kind)
    activation: Any = Silu()
    x, chosen = normal(9, HIDDEN), choose(9, which)
    factors = torch.rand(9, PER_TOKEN, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    total = GroupedQuantizedProduct(weights, activation)(x, chosen, factors)
    inner = gate_exactly(*multiply_rows(x, weights.gate_up, chosen))
    outputs = multiply_exactly(*inner, weights.down, chosen)
    products, bounds = (values.nan_to_num().view(9, PER_TOKEN, HIDDEN) for values in outputs)
    scaled = factors.double()[:, :, None]
    bounds = (scaled * (bounds + SUMMING * products.abs())).sum(1)
    expected = (scaled * products).sum(1)
    assert total.dtype == torch.float32
    live = (chosen < EXPERTS).any(1)
    assert not total[~live].any()
    assert_within(total[live], expected[live], bounds[live])


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_graphs_capture_products() -> None:
    weights: Any = FakeWeights("e4m3-blocks")
    activation: Any = Silu()
    product = GroupedQuantizedProduct(weights, activation)
    x, chosen = normal(9, HIDDEN), choose(9, "mixed")
    factors = torch.rand(9, PER_TOKEN, device=DEVICE)
    product(x, chosen, factors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product(x, chosen, factors)
    chosen.copy_(choose(9, "one"))
    graph.replay()
    assert torch.equal(captured, product(x, chosen, factors))
