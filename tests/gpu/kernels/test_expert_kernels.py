# SPDX-License-Identifier: Apache-2.0
"""Kernels of experts equal plain loops, whatever unused memory holds: on a GPU, or in Triton's interpreter
(TRITON_INTERPRET=1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from triton_device import DEVICE, DTYPE, GPU, RUNS_TRITON

from mizzen.kernels.experts import align, few_rows, grouped_gemm, router, weighted_sum
from mizzen.kernels.experts.few_rows import FewRowsTile
from mizzen.kernels.experts.gate import Gate
from mizzen.kernels.experts.grouped_gemm import GroupedTile
from mizzen.layers.activation import ActivationFunction
from mizzen.layers.context import BuildContext
from mizzen.layers.experts.kernel_plans import HOPPER_PLAN, ManyRows
from mizzen.layers.experts.kernel_product import ExpertKernels, KernelProduct, KernelRouter, make_rules
from mizzen.layers.experts.products import SortedProduct
from mizzen.layers.experts.router import ExpertRouter
from mizzen.models.block import Activation
from mizzen.models.experts_config import ExpertsConfig, Scoring

pytestmark = [*RUNS_TRITON, pytest.mark.usefixtures("poisoned_buffers")]
TOLERANCE = 0.02 if GPU else 1e-5
HELD, HIDDEN, WIDTH, PER_TOKEN = 5, 72, 40, 3
NAN = float("nan")
LIMIT, SLOPE = 0.5, 1.702
GATES = {
    Activation.SILU: lambda gate, up: F.silu(gate) * up,
    Activation.GELU_TANH: lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    Activation.CLAMPED_SWIGLU: lambda gate, up: (
        gate.clamp(max=LIMIT) * (SLOPE * gate.clamp(max=LIMIT)).sigmoid() * (up.clamp(-LIMIT, LIMIT) + 1)
    ),
}
FEW = FewRowsTile(32, 64, 4)
GROUPED = GroupedTile(16, 32, 32, 3, 4, swap=False)
SWAPPED = GroupedTile(16, 64, 32, 3, 4, swap=True)
SPANNED = GroupedTile(16, 32, 32, 3, 4, swap=False, span=4)


def normal(*shape: int, seed: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def choices(tokens: int, kind: str) -> torch.Tensor:
    """Return experts of tokens, int64 [tokens, PER_TOKEN]; HELD is an expert of another rank, -1 none."""
    generator = torch.Generator().manual_seed(tokens)
    rows = [torch.randperm(HELD + 2, generator=generator)[:PER_TOKEN] - 1 for _ in range(tokens)]
    chosen = torch.stack(rows)
    if kind == "one gets all":
        chosen[:, 1] = HELD - 1
        chosen[:, ::2] = HELD
    elif kind == "none":
        chosen.fill_(HELD)
    return chosen.to(DEVICE)


class Experts:
    """Random weights of experts; those of experts that no token has chosen are NaN."""

    def __init__(self, chosen: torch.Tensor, biases: bool) -> None:
        self.gate_up = normal(HELD, 2 * WIDTH, HIDDEN, seed=1) / HIDDEN**0.5
        self.down = normal(HELD, HIDDEN, WIDTH, seed=2) / WIDTH**0.5
        self.gate_up_bias = normal(HELD, 2 * WIDTH, seed=3) if biases else None
        self.down_bias = normal(HELD, HIDDEN, seed=4) if biases else None
        for expert in set(range(HELD)) - set(chosen.flatten().tolist()):
            self.gate_up[expert], self.down[expert] = NAN, NAN

    def loop(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, kind: Activation
    ) -> torch.Tensor:
        """Return the sums of outputs, float64, of one token and one expert at a time."""
        totals = torch.zeros(len(x), HIDDEN, dtype=torch.float64, device=DEVICE)
        for token, experts in enumerate(chosen.tolist()):
            for k, expert in enumerate(experts):
                if 0 <= expert < HELD:
                    inner = self.gate_up[expert].double() @ x[token].double()
                    if self.gate_up_bias is not None:
                        inner += self.gate_up_bias[expert].double()
                    output = self.down[expert].double() @ GATES[kind](*inner.chunk(2))
                    if self.down_bias is not None:
                        output += self.down_bias[expert].double()
                    totals[token] += weights[token, k].double() * output
        return totals

    def run(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        kind: Activation,
        tile: FewRowsTile | GroupedTile,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sums of outputs, computed by the kernels for a tile."""
        gate = Gate(kind, LIMIT, SLOPE)
        if isinstance(tile, FewRowsTile):
            inner = few_rows.gate_up_rows(x, chosen, self.gate_up, gate, tile, self.gate_up_bias)
            return few_rows.down_rows(inner, chosen, weights, self.down, tile, self.down_bias, added)
        aligned = align.align_pairs(chosen, HELD, tile.rows)
        inner = grouped_gemm.gate_up_grouped(
            x, PER_TOKEN, aligned, self.gate_up, gate, tile, self.gate_up_bias
        )
        outputs = grouped_gemm.down_grouped(inner, aligned, self.down, tile, self.down_bias)
        return weighted_sum.sum_pairs(outputs, chosen, weights, HELD, added)


@pytest.mark.parametrize(
    "tile", [FEW, GROUPED, SWAPPED, SPANNED], ids=["few", "grouped", "swapped", "spanned"]
)
@pytest.mark.parametrize(
    ("tokens", "choice", "kind", "extra"),
    [
        (1, "mixed", Activation.SILU, False),
        (7, "mixed", Activation.CLAMPED_SWIGLU, True),
        (9, "none", Activation.SILU, True),
        (8, "mixed", Activation.GELU_TANH, False),
        (18, "one gets all", Activation.SILU, False),
    ],
)
def test_products_equal_a_plain_loop(
    tokens: int, choice: str, kind: Activation, extra: bool, tile: FewRowsTile | GroupedTile
) -> None:
    chosen = choices(tokens, choice)
    experts, x = Experts(chosen, biases=extra), normal(tokens, HIDDEN, seed=5)
    weights = normal(tokens, PER_TOKEN, seed=6, dtype=torch.float32).abs()
    weights[chosen >= HELD] = NAN
    added = normal(tokens, HIDDEN, seed=7) if extra else None
    expected = experts.loop(x, chosen, weights, kind)
    found = experts.run(x, chosen, weights, kind, tile, added)
    expected = expected if added is None else expected + added.double()
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE, atol=TOLERANCE * 4)


@pytest.mark.parametrize("tile", [FEW, SWAPPED], ids=["few", "swapped"])
def test_a_row_is_the_same_alone_and_in_company(tile: FewRowsTile | GroupedTile) -> None:
    chosen = choices(9, "mixed")
    experts, x = Experts(chosen, biases=True), normal(9, HIDDEN, seed=5)
    weights = normal(9, PER_TOKEN, seed=6, dtype=torch.float32)
    together = experts.run(x, chosen, weights, Activation.SILU, tile)
    x[6:] = NAN
    for rows in (slice(0, 1), slice(3, 5)):
        part = x[rows], chosen[rows], weights[rows]
        assert torch.equal(experts.run(*part, Activation.SILU, tile), together[rows])
    assert torch.equal(experts.run(x, chosen, weights, Activation.SILU, tile)[:6], together[:6])


@pytest.mark.parametrize(("tokens", "block"), [(1, 16), (33, 16), (400, 32)])
@pytest.mark.parametrize("choice", ["mixed", "one gets all", "none"])
def test_pairs_are_aligned_by_expert(tokens: int, block: int, choice: str) -> None:
    chosen = choices(tokens, choice)
    aligned = align.align_pairs(chosen, HELD, block)
    pairs, experts = [], []
    for expert in range(HELD):
        own = [pair for pair, found in enumerate(chosen.flatten().tolist()) if found == expert]
        blocks = -(-len(own) // block)
        experts += [expert] * blocks
        pairs += own + [-1] * (blocks * block - len(own))
    unused = len(aligned.experts) - len(experts)
    assert aligned.experts.tolist() == experts + [-1] * unused
    assert aligned.pairs[: len(pairs)].tolist() == pairs
    assert len(aligned.pairs) == len(aligned.experts) * block


def test_the_worst_case_fills_all_blocks() -> None:
    """Each expert has a full block and one more pair."""
    for held, block in ((3, 16), (7, 32)):
        chosen = torch.arange(held).repeat(block + 1)[:, None].to(DEVICE)
        assert -1 not in align.align_pairs(chosen, held, block).experts.tolist()


CONFIG = ExpertsConfig(count=9, per_token=3, width=8, layers=(True,))
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "plain": {"renormalize": False, "scale": 1.5, "router_bias": True},
    "sigmoid": {"scoring": Scoring.SIGMOID, "correction_bias": True, "scale": 2.5},
    "groups": {
        "scoring": Scoring.SIGMOID,
        "correction_bias": True,
        "groups": 3,
        "top_groups": 2,
        "count": 12,
    },
    "floor": {"correction_bias": True, "sum_floor": 0.9},
    "all": {"per_token": 9},
}


def make_router(kind: str) -> ExpertRouter:
    build = BuildContext(device=DEVICE, dtype=DTYPE)
    made = ExpertRouter(build, replace(CONFIG, **ROUTERS[kind]), HIDDEN, "")
    made.weight.copy_(normal(len(made.weight), HIDDEN, seed=8) / HIDDEN**0.5)
    for bias, seed in ((made.bias, 9), (made.logit_bias, 10)):
        if bias is not None:
            bias.copy_(normal(len(bias), seed=seed) / 2)
    return made


@pytest.mark.parametrize("kind", ROUTERS)
def test_experts_are_chosen_as_without_the_kernel(kind: str) -> None:
    """Rows of equal logits, of large ones and of NaN are among the tokens."""
    plain, x = make_router(kind), normal(12, HIDDEN, seed=11)
    x[3], x[5], x[7] = 0, 1e4, NAN
    logits = plain.compute_logits(x)
    chosen, weights = router.choose_experts(logits, make_rules(plain), correction=plain.bias)
    expected_chosen, expected_weights = plain(x)
    assert torch.equal(chosen, expected_chosen)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_logits_of_few_tokens_equal_those_of_a_gemm() -> None:
    plain, x = make_router("plain"), normal(12, HIDDEN, seed=11)
    kernels = KernelRouter(plain)
    whole, rows = kernels(x), [kernels(x[i : i + 3]) for i in range(0, 12, 3)]
    assert torch.equal(whole[0], torch.cat([chosen for chosen, _ in rows]))
    torch.testing.assert_close(whole[1], torch.cat([weights for _, weights in rows]), rtol=1e-4, atol=1e-5)


def test_experts_of_other_ranks_and_padding_rows_are_not_held() -> None:
    plain, x = make_router("sigmoid"), normal(9, HIDDEN, seed=11)
    logits, rules = plain.compute_logits(x), make_rules(plain)
    everywhere, weights = router.choose_experts(logits, rules, correction=plain.bias)
    live = torch.tensor([True, False, True, True, True, True, False, False, False], device=DEVICE)
    chosen, own_weights = router.choose_experts(
        logits, rules, correction=plain.bias, held=slice(2, 6), live=live
    )
    held = (everywhere >= 2) & (everywhere < 6)
    held &= live[:, None]
    assert held.any() and not held.all()
    assert torch.equal(chosen, torch.where(held, everywhere - 2, 4))
    assert torch.equal(own_weights, torch.where(held, weights, 0.0))
    for rows in (slice(0, 3), slice(0, 9)):
        found, expected = KernelRouter(plain)(x[rows], live[rows]), plain(x[rows], live[rows])
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)


def test_every_variant_of_the_plan_equals_the_product_without_kernels() -> None:
    plain, x = make_router("softmax"), normal(9, HIDDEN, seed=11)
    weights = normal(9, 2 * WIDTH, HIDDEN, seed=12) / HIDDEN**0.5, normal(9, HIDDEN, WIDTH, seed=13)
    build = BuildContext(device=DEVICE, dtype=DTYPE)
    library = SortedProduct(*weights, ActivationFunction(build, Activation.SILU))
    product = KernelProduct(*weights, library.activation, None, library, experts=9)
    kernels = ExpertKernels(KernelRouter(plain), product)
    kernels.compile(adds=True)
    expected = library(x, *plain(x)) + x.float()
    for variant in HOPPER_PLAN.variants:
        if not GPU and isinstance(variant, ManyRows):
            continue  # the interpreter runs only Triton's kernels
        found = product.run(x, *kernels.router(x), added=x, variant=variant)
        assert found.dtype == DTYPE
        tolerance = TOLERANCE * expected.abs().max().item()
        torch.testing.assert_close(found.float(), expected, rtol=TOLERANCE, atol=tolerance)
