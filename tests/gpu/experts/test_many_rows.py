# SPDX-License-Identifier: Apache-2.0
"""The kernels of many rows per expert equal plain loops, whatever unused memory holds."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hopper import on_hopper

from mizzen.kernels.experts import sorted_pairs
from mizzen.kernels.experts.gate import Gate
from mizzen.kernels.experts.many_rows import (
    GROUP_COLUMNS,
    ManyRowsExperts,
    ManyRowsOperand,
    ManyRowsTile,
    gate_up_many_rows,
)
from mizzen.layers.activation import ActivationFunction
from mizzen.layers.context import BuildContext
from mizzen.layers.experts.kernel_plans import ManyRows
from mizzen.layers.quantized.canonical import Codes
from mizzen.models.block import Activation
from mizzen.quantization.schemes import Activations, ActivationScales
from random_weights import make_experts, sum_by_loop

pytestmark = [*on_hopper("triton", "Triton"), pytest.mark.usefixtures("poisoned_buffers")]
EXPERTS, PER_TOKEN, HIDDEN, WIDTH = 5, 3, 384, 256
TILES = [ManyRowsTile(144, 4), ManyRowsTile(128, 3), ManyRowsTile(128, 4, 2), ManyRowsTile(16, 4)]
FORMATS = ["bf16", "e4m3-blocks", "e4m3-channel"]
BLOCK_STEP = sorted_pairs.BLOCK_STEP
SILU = Gate(Activation.SILU)
GATES = {"silu": SILU, "gelu": Gate(Activation.GELU_TANH), "clamped": Gate(Activation.CLAMPED_SWIGLU, 0.5)}


def normal(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda")


def choose(tokens: int, which: str = "mixed") -> torch.Tensor:
    """Return experts of tokens, int64 [tokens, PER_TOKEN]; EXPERTS is an expert of another rank."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    order = torch.rand(tokens, EXPERTS + 1, generator=generator, device="cuda").argsort(1)
    chosen = order[:, :PER_TOKEN].clone()
    if which == "one gets all":
        chosen[:, 1] = EXPERTS - 1
        chosen[:, ::2] = EXPERTS
    elif which == "none":
        chosen.fill_(EXPERTS)
    return chosen


@dataclass(frozen=True)
class Weights:
    """Weights of a projection, and their values [EXPERTS, rows, columns] in float64."""

    operand: ManyRowsOperand
    values: torch.Tensor


def make_weights(kind: str, rows: int, columns: int, seed: int) -> Weights:
    values = normal(EXPERTS * rows, columns, seed=seed) * columns**-0.5
    if kind == "bf16":
        rounded = values.bfloat16()
        return Weights(ManyRowsOperand(values=rounded), rounded.double().view(EXPERTS, rows, columns))
    codes = (values * columns**0.5 * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    step = 1 if kind == "e4m3-channel" else 128
    groups = 1 if kind == "e4m3-channel" else columns // 128
    scales = (normal(EXPERTS * rows // step, groups, seed=seed + 1).abs() + 0.5) * 0.01 * columns**-0.5
    wide = scales.double().repeat_interleave(step, 0).repeat_interleave(columns // groups, 1)
    operand = ManyRowsOperand(values=codes.view(torch.uint8), scales=scales, row_step=step)
    return Weights(operand, (codes.double() * wide).view(EXPERTS, rows, columns))


def make_inputs(kind: str, x: torch.Tensor) -> ManyRowsOperand:
    from mizzen.layers.experts.coded_kernel_product import GROUPED_E4M3, quantize_inputs

    if kind == "bf16":
        return ManyRowsOperand(values=x)
    quantized = quantize_inputs(x, GROUPED_E4M3)
    return ManyRowsOperand(values=quantized.values, scales=quantized.scales)


def decode(x: ManyRowsOperand) -> torch.Tensor:
    """Return the values of inputs or inner elements in float64."""
    if x.scales is None:
        return x.values.double()
    scales = x.scales[:, : len(x.values)].T.double()
    return x.values.double() * scales.repeat_interleave(GROUP_COLUMNS, 1)


def apply_gate(kind: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if kind == "gelu":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    if kind == "clamped":
        gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5) + 1
        return gate * torch.sigmoid(1.702 * gate) * up
    return torch.nn.functional.silu(gate) * up


def assert_near(found: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=share, atol=share * expected.abs().max().item())


@pytest.mark.parametrize("tokens", [1, 37, 700])
@pytest.mark.parametrize("which", ["mixed", "one gets all", "none"])
def test_pairs_are_sorted_stably_and_divided_evenly(which: str, tokens: int) -> None:
    chosen = choose(tokens, which)
    found = sorted_pairs.sort_pairs(chosen, EXPERTS, 48)
    experts, order = chosen.flatten().sort(stable=True)
    order = order[experts < EXPERTS]
    assert torch.equal(found.pairs[: len(order)].long(), order)
    blocks = found.blocks.view(-1, sorted_pairs.BLOCK_INTS)[: int(found.count[0])].tolist()
    start, number = 0, 0
    for expert in range(EXPERTS):
        count = int((experts == expert).sum())
        parts = -(-count // 48)
        for part in range(parts):
            own = blocks[number + part]
            steps = -(-count // BLOCK_STEP)
            first, last = (steps * at // parts * BLOCK_STEP for at in (part, part + 1))
            size = min(count, last) - first
            assert [own[0], own[1], own[2], own[4], own[5]] == [expert, start, size, number, parts]
            start += size
        number += parts
    assert number == len(blocks)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "tokens, which", [(1, "mixed"), (37, "mixed"), (700, "mixed"), (300, "one gets all")]
)
def test_outputs_equal_a_plain_loop(tokens: int, which: str, kind: str, tile: ManyRowsTile) -> None:
    if kind != "bf16" and tile.pairs > 128:
        pytest.skip("E4M3 has smaller tiles")
    gate_up = make_weights(kind, 2 * WIDTH, HIDDEN, 1)
    down = make_weights(kind, HIDDEN, WIDTH, 3)
    chosen, x = choose(tokens, which), normal(tokens, HIDDEN, seed=5).bfloat16()
    experts = ManyRowsExperts(gate_up=gate_up.operand, down=down.operand, held=EXPERTS, gate=SILU)
    inputs, pairs = make_inputs(kind, x), sorted_pairs.sort_pairs(chosen, EXPERTS, tile.block)
    inner = gate_up_many_rows(inputs, PER_TOKEN, pairs, gate_up.operand, EXPERTS, SILU, tile)
    outputs = experts.multiply(inputs, PER_TOKEN, pairs, tile)
    exact, values = decode(inputs), decode(inner)
    start = 0
    for expert in range(EXPERTS):
        rows = (chosen.flatten() == expert).nonzero()[:, 0]
        own = slice(start, start + len(rows))
        start += len(rows)
        if len(rows):
            products = exact[rows // PER_TOKEN] @ gate_up.values[expert].T
            expected = apply_gate("silu", products[:, :WIDTH], products[:, WIDTH:])
            assert_near(values[own], expected, 0.02 if kind == "bf16" else 0.07)
            assert_near(outputs[rows], values[own] @ down.values[expert].T, 0.01)
    held = (chosen < EXPERTS).flatten()
    assert torch.equal(experts.multiply(inputs, PER_TOKEN, pairs, tile)[held], outputs[held])


@pytest.mark.parametrize("gate", GATES)
def test_gates_and_biases_of_partial_tiles(gate: str) -> None:
    width, hidden, tile = 192, 320, ManyRowsTile(144, 4)
    gate_up, down = make_weights("bf16", 2 * width, hidden, 1), make_weights("bf16", hidden, width, 3)
    biases = normal(EXPERTS, 2 * width, seed=7).bfloat16(), normal(EXPERTS, hidden, seed=8).bfloat16()
    experts = ManyRowsExperts(
        gate_up=gate_up.operand,
        down=down.operand,
        held=EXPERTS,
        gate=GATES[gate],
        gate_up_bias=biases[0],
        down_bias=biases[1],
    )
    chosen, x = choose(100), normal(100, hidden, seed=5).bfloat16()
    pairs = sorted_pairs.sort_pairs(chosen, EXPERTS, tile.block)
    outputs = experts.multiply(ManyRowsOperand(values=x), PER_TOKEN, pairs, tile)
    for expert in range(EXPERTS):
        rows = (chosen.flatten() == expert).nonzero()[:, 0]
        products = x.double()[rows // PER_TOKEN] @ gate_up.values[expert].T + biases[0][expert].double()
        inner = apply_gate(gate, products[:, :width], products[:, width:])
        expected = inner @ down.values[expert].T + biases[1][expert].double()
        assert_near(outputs[rows], expected, 0.02)


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_do_not_depend_on_others(kind: str) -> None:
    tile = ManyRowsTile(128, 4)
    gate_up, down = make_weights(kind, 2 * WIDTH, HIDDEN, 1), make_weights(kind, HIDDEN, WIDTH, 3)
    experts = ManyRowsExperts(gate_up=gate_up.operand, down=down.operand, held=EXPERTS, gate=SILU)
    chosen, x = choose(400), normal(400, HIDDEN, seed=5).bfloat16()

    def run(count: int) -> torch.Tensor:
        pairs = sorted_pairs.sort_pairs(chosen[:count], EXPERTS, tile.block)
        return experts.multiply(make_inputs(kind, x[:count]), PER_TOKEN, pairs, tile)

    held = (chosen < EXPERTS).flatten()
    few, many = run(11), run(400)
    assert torch.equal(few[held[:33]], many[:33][held[:33]])
    assert torch.equal(run(400)[held], many[held])


@pytest.mark.parametrize("steps", [(128, 128), (1, 0)], ids=["blocks", "channels"])
def test_products_round_inputs_to_e4m3_if_the_format_does(steps: tuple[int, int]) -> None:
    from mizzen.layers.experts.coded_kernel_plans import find_plan
    from mizzen.layers.experts.coded_kernel_product import CodedKernelProduct

    row_step, column_step = steps
    known: dict[str, Any] = {"codes": Codes.E4M3, "row_step": row_step, "column_step": column_step}
    gate_up = make_experts(EXPERTS, 2 * WIDTH, HIDDEN, torch.device("cuda"), **known)
    down = make_experts(EXPERTS, HIDDEN, WIDTH, torch.device("cuda"), **known)
    weights: Any = SimpleNamespace(gate_up=gate_up, down=down, biases=None, dtype=torch.bfloat16)
    activation = ActivationFunction(
        BuildContext(device=torch.device("cuda"), dtype=torch.bfloat16, fused=True), Activation.SILU
    )
    library: Any = None
    plan = find_plan(gate_up.weight, down.weight)
    assert plan is not None
    assert CodedKernelProduct(weights, activation, library, experts=EXPERTS, plan=plan).many_rows is None
    for each in (gate_up, down):
        each.weight.activations = Activations(scales=ActivationScales.TOKEN)
    product = CodedKernelProduct(weights, activation, library, experts=EXPERTS, plan=plan)
    chosen, x = choose(500), normal(500, HIDDEN, seed=5).bfloat16()
    factors = torch.rand(500, PER_TOKEN, device="cuda")
    variant = ManyRows(ManyRowsTile(128, 4))
    found = product.run(x, chosen, factors, variant=variant)
    plain = ActivationFunction(BuildContext(device=torch.device("cpu"), dtype=torch.float64), Activation.SILU)
    expected = sum_by_loop(weights, plain, x.cpu(), chosen.cpu(), factors.cpu())
    difference = (found.cpu().double() - expected).norm() / expected.norm()
    assert 0.001 < difference < 0.06


def test_blocks_of_another_size_are_refused() -> None:
    weights = make_weights("bf16", 2 * WIDTH, HIDDEN, 1).operand
    x, pairs = normal(8, HIDDEN, seed=5).bfloat16(), sorted_pairs.sort_pairs(choose(8), EXPERTS, 64)
    with pytest.raises(ValueError, match="up to 64 pairs"):
        gate_up_many_rows(
            ManyRowsOperand(values=x), PER_TOKEN, pairs, weights, EXPERTS, SILU, ManyRowsTile(128, 4)
        )
