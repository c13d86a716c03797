# SPDX-License-Identifier: Apache-2.0
"""Kernels that decode experts' weights equal plain loops, whatever unused memory holds: on a GPU, or in
Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_device import DEVICE, DTYPE, GPU, RUNS_TRITON

from mizzen.kernels.experts.few_rows import FewRowsTile
from mizzen.kernels.experts.grouped_gemm import GroupedTile
from mizzen.layers.activation import ActivationFunction, ClampedSwiGLU
from mizzen.layers.context import BuildContext
from mizzen.layers.experts.biases import ExpertBiases
from mizzen.layers.experts.coded_kernel_product import CodedKernelProduct
from mizzen.layers.experts.kernel_plans import FewRows, Grouped
from mizzen.layers.experts.quantized_kernel_product import make_matrices
from mizzen.layers.quantized.canonical import Codes
from mizzen.models.block import Activation
from random_weights import make_experts, sum_by_loop

pytestmark = [*RUNS_TRITON, pytest.mark.usefixtures("poisoned_buffers")]
TOLERANCE = 0.02 if GPU else 1e-5
EXPERTS, HIDDEN, WIDTH, PER_TOKEN = 3, 96, 160, 2
KINDS: dict[str, dict[str, Any]] = {
    "e4m3-channel": {"codes": Codes.E4M3},
    "e4m3-blocks": {"codes": Codes.E4M3, "row_step": 32, "column_step": 128},
    "e4m3-small-blocks": {"codes": Codes.E4M3, "row_step": 8, "column_step": 16},
    "int8": {"codes": Codes.INT8, "column_step": 32},
    "uint8-zeros": {"codes": Codes.UINT8, "column_step": 32, "zeros": True},
    "uint4": {"codes": Codes.UINT4, "column_step": 32, "dtype": torch.bfloat16},
    "uint4-zeros": {"codes": Codes.UINT4, "column_step": 64, "zeros": True, "dtype": torch.float16},
    "uint4-channel-zeros": {"codes": Codes.UINT4, "zeros": True},
    "e2m1": {"codes": Codes.E2M1, "column_step": 32},
}
TILES = {
    "few": FewRows(FewRowsTile(8, 64, 4), FewRowsTile(4, 128, 4)),
    "16, swapped": Grouped(
        GroupedTile(16, 64, 64, 3, 4, swap=True), GroupedTile(16, 64, 128, 3, 4, swap=True)
    ),
    "16": Grouped(GroupedTile(16, 32, 128, 3, 4, swap=False), GroupedTile(16, 64, 64, 3, 4, swap=False)),
    "32, span": Grouped(
        GroupedTile(32, 64, 64, 3, 4, swap=False, span=4), GroupedTile(32, 64, 64, 3, 4, swap=True, span=4)
    ),
}


class Weights:
    """Loaded weights of a mixture, with biases or none."""

    def __init__(self, kind: str, *, biased: bool = False) -> None:
        self.gate_up = make_experts(EXPERTS, 2 * WIDTH, HIDDEN, DEVICE, **KINDS[kind])
        self.down = make_experts(EXPERTS, HIDDEN, WIDTH, DEVICE, **KINDS[kind])
        self.biases: ExpertBiases | None = None
        self.dtype = DTYPE
        if biased:
            self.biases = ExpertBiases(normal(EXPERTS, 2 * WIDTH, seed=1), normal(EXPERTS, HIDDEN, seed=2))


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def choose(tokens: int, which: str) -> torch.Tensor:
    """Return experts of tokens, int64 [tokens, PER_TOKEN]; EXPERTS is an expert of another rank."""
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, EXPERTS + 1, generator=generator).argsort(1)[:, :PER_TOKEN].clone()
    if which == "one gets all":
        chosen[:, 1] = EXPERTS - 1
        chosen[:, ::2] = EXPERTS
    elif which == "none":
        chosen.fill_(EXPERTS)
    return chosen.to(DEVICE)


def silu() -> ActivationFunction:
    return ActivationFunction(BuildContext(device=torch.device("cpu"), dtype=torch.float64), Activation.SILU)


def expect(weights: Weights, activation: Any, x: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor):
    """Return the sums of a loop over experts, in float64, on the CPU."""
    return sum_by_loop(weights, activation, x.cpu(), chosen.cpu(), factors.cpu())


def run(
    weights: Any, activation: Any, tile: str, x: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    library: Any = None
    plan: Any = None
    product = CodedKernelProduct(weights, activation, library, experts=EXPERTS, plan=plan)
    return product.run(x, chosen, factors, added=x, variant=TILES[tile])


def make_batch(tokens: int, which: str = "mixed") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    factors = torch.rand(tokens, PER_TOKEN, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return normal(tokens, HIDDEN, seed=7), choose(tokens, which), factors


def assert_sums(found: torch.Tensor, expected: torch.Tensor, x: torch.Tensor) -> None:
    expected = expected + x.cpu().double()
    scale = expected.abs().max().item()
    torch.testing.assert_close(found.cpu().double(), expected, rtol=TOLERANCE, atol=TOLERANCE * scale)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_all_formats_equal_a_plain_loop(kind: str, tile: str) -> None:
    weights, batch = Weights(kind), make_batch(4)
    assert make_matrices(weights.gate_up).decodable and make_matrices(weights.down).decodable
    assert_sums(run(weights, silu(), tile, *batch), expect(weights, silu(), *batch), batch[0])


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("which", ["mixed", "one gets all", "none"])
def test_biases_and_clamped_gates_are_those_of_gpt_oss(which: str, tile: str) -> None:
    weights, gate, batch = Weights("e2m1", biased=True), ClampedSwiGLU(0.5, 1.702), make_batch(18, which)
    assert_sums(run(weights, gate, tile, *batch), expect(weights, gate, *batch), batch[0])


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("kind", ["e4m3-blocks", "uint4-zeros", "e2m1"])
def test_a_row_has_the_same_result_in_any_batch(kind: str, tile: str) -> None:
    weights, batch = Weights(kind), make_batch(9)
    whole = run(weights, silu(), tile, *batch)
    for tokens in (1, 5):
        part = [tensor[-tokens:] for tensor in batch]
        assert torch.equal(run(weights, silu(), tile, part[0], part[1], part[2]), whole[-tokens:])


def test_steps_that_cross_tiles_are_not_decoded() -> None:
    experts = make_experts(EXPERTS, 2 * WIDTH, HIDDEN, DEVICE, **KINDS["e4m3-channel"])
    experts.weight.column_step = 24
    assert not make_matrices(experts).decodable
    experts.weight.column_step = 32
    assert make_matrices(experts).decodable
    experts.orders = torch.zeros(EXPERTS, HIDDEN, dtype=torch.int32)
    assert not make_matrices(experts).decodable
