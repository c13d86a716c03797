# SPDX-License-Identifier: Apache-2.0
"""Routers and products of mixtures of experts equal plain loops, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from mizzen.layers.activation import ActivationFunction
from mizzen.layers.context import BuildContext
from mizzen.layers.experts.biases import ExpertBiases
from mizzen.layers.experts.products import (
    GroupedProduct,
    MaskedProduct,
    SortedProduct,
    make_product,
)
from mizzen.layers.experts.router import ExpertRouter, mix_sparsely
from mizzen.layers.experts.weights import ExpertWeights
from mizzen.layers.sharding import Axis, Mesh
from mizzen.models.block import Activation
from mizzen.models.experts_config import ExpertLayout, ExpertsConfig, Scoring

HIDDEN = 16
BUILD = BuildContext(device=torch.device("cpu"), dtype=torch.float32)
EXPERTS = ExpertsConfig(count=9, per_token=3, width=8, layers=(True,))
PRODUCTS = (SortedProduct, GroupedProduct, MaskedProduct)
NAN = float("nan")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_router(
    experts: ExpertsConfig, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> ExpertRouter:
    router = ExpertRouter(BUILD, experts, weight.shape[1], "")
    router.weight.copy_(weight)
    if router.bias is not None and bias is not None:
        router.bias.copy_(bias)
    return router


def route(experts: ExpertsConfig, logits: list[float], bias: list[float] | None = None) -> dict[int, float]:
    """Return the weight of each chosen expert of one token, computed with plain numbers."""
    x = torch.tensor(logits, dtype=torch.float64)
    scores = (x.softmax(0) if experts.scoring is Scoring.SOFTMAX else x.sigmoid()).tolist()
    ranked = [score + (bias[i] if bias else 0) for i, score in enumerate(scores)]
    size = experts.count // experts.groups
    groups = [range(first, first + size) for first in range(0, experts.count, size)]
    best = sorted(groups, key=lambda group: -sum(sorted(ranked[i] for i in group)[-2:]))
    candidates = sorted(i for group in best[: experts.top_groups] for i in group)
    chosen = sorted(candidates, key=lambda i: -ranked[i])[: experts.per_token]
    total = max(sum(scores[i] for i in chosen), experts.sum_floor) if experts.renormalize else 1
    return {i: scores[i] / total * experts.scale for i in chosen}


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "plain": {"renormalize": False, "scale": 1.5},
    "sigmoid": {"scoring": Scoring.SIGMOID, "correction_bias": True, "scale": 2.5},
    "groups": {
        "scoring": Scoring.SIGMOID,
        "correction_bias": True,
        "groups": 3,
        "top_groups": 2,
        "count": 12,
    },
    "floor": {"correction_bias": True, "sum_floor": 0.9},
    "biased": {"router_bias": True},
    "one": {"per_token": 1, "renormalize": False},
    "all": {"per_token": 9},
}


@pytest.mark.parametrize("kind", ROUTERS)
def test_routers_equal_a_plain_loop(kind: str) -> None:
    experts = replace(EXPERTS, **ROUTERS[kind])
    bias = random(experts.count, seed=1) * 0.5 if experts.correction_bias else None
    router = make_router(experts, random(experts.count, HIDDEN, seed=2), bias)
    logit_bias = torch.zeros(experts.count) if router.logit_bias is None else random(experts.count, seed=7)
    if router.logit_bias is not None:
        router.logit_bias.copy_(logit_bias)
    x = random(50, HIDDEN, seed=3)
    chosen, weights = router(x)
    assert chosen.shape == weights.shape == (50, experts.per_token)
    logits = (x.double() @ router.weight.double().t() + logit_bias).tolist()
    for token, row in enumerate(logits):
        expected = route(experts, row, None if bias is None else bias.tolist())
        found = dict(zip(chosen[token].tolist(), weights[token].tolist(), strict=True))
        assert found == pytest.approx(expected, rel=1e-5)


def test_the_first_of_equal_experts_are_chosen_in_any_batch() -> None:
    weight = torch.zeros(EXPERTS.count, HIDDEN)
    weight[4] = 1.0
    router = make_router(EXPERTS, weight)
    x = torch.ones(300, HIDDEN)
    for batch in (x[:1], x[:7], x):
        chosen, weights = router(batch)
        assert chosen.tolist() == [[4, 0, 1]] * len(batch)
        assert torch.equal(weights, weights[:1].expand_as(weights))


@pytest.mark.parametrize("jitter", [0.01, 0.2])
def test_sparsemixer_equals_transformers(jitter: float) -> None:
    """Among the rows are ones with equal logits, with none above 0, and with zeros alone."""
    logits = random(200, 16, seed=8)
    logits[:50] = logits[:50].mul(4).round() / 8
    logits[50:100] = -logits[50:100].abs()
    logits[100] = 0
    chosen, weights = mix_sparsely(logits, 2, jitter)
    expected_weights, expected = sparsemixer(logits, jitter, training=False)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=0)
    assert 0.1 < (weights == 1).float().mean() < 0.95


def test_the_kernel_that_chooses_experts_refuses_sparsemixer() -> None:
    from mizzen.layers.experts.kernel_product import make_rules

    experts = replace(EXPERTS, per_token=2, scoring=Scoring.SPARSEMIXER)
    with pytest.raises(ValueError, match="sparsemixer has no kernel"):
        make_rules(make_router(experts, random(experts.count, HIDDEN)))


def reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """Return the sums of outputs, float64, of one token and one expert at a time."""
    rows = []
    for token, experts, factors in zip(x.double(), chosen.tolist(), weights.double(), strict=True):
        total = torch.zeros(x.shape[1], dtype=torch.float64)
        for expert, factor in zip(experts, factors, strict=True):
            inner = gate_up[expert].double() @ token + (biases.gate_up[expert] if biases else 0)
            gate, up = inner.chunk(2)
            added = biases.down[expert] if biases and biases.down is not None else 0
            total += factor * (down[expert].double() @ (F.silu(gate) * up) + added)
        rows.append(total)
    return torch.stack(rows)


def make_weights(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up, down = random(9, 16, HIDDEN, seed=4), random(9, HIDDEN, 8, seed=5)
    return gate_up.to(dtype), down.to(dtype)


def choose_unequally(tokens: int) -> torch.Tensor:
    """Choose expert 7 for all tokens, experts 0 to 5 for some, and experts 6 and 8 for none."""
    others = torch.stack(
        [torch.randperm(6, generator=torch.Generator().manual_seed(i))[:2] for i in range(tokens)]
    )
    return torch.cat([others[:, :1], torch.full((tokens, 1), 7), others[:, 1:]], dim=1)


ACTIVATION = ActivationFunction(BUILD, Activation.SILU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_equal_a_plain_loop(kind: Callable[..., Any], tokens: int, dtype: torch.dtype) -> None:
    """Experts that no token has chosen hold NaN, which must not reach any token."""
    gate_up, down = make_weights(dtype)
    x, chosen, weights = (
        random(tokens, HIDDEN, seed=6).to(dtype),
        choose_unequally(tokens),
        random(tokens, 3).abs(),
    )
    expected = reference(x, gate_up, down, chosen, weights)
    for unused in (6, 8):
        gate_up[unused], down[unused] = NAN, NAN
    found = kind(gate_up, down, ACTIVATION)(x, chosen, weights)
    assert found.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=30 * tolerance)


@pytest.mark.parametrize("adds_down", [False, True])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_biases_are_those_of_the_chosen_experts(kind: Callable[..., Any], adds_down: bool) -> None:
    gate_up, down = make_weights()
    biases = ExpertBiases(random(9, 16, seed=8), random(9, HIDDEN, seed=9) if adds_down else None)
    x, chosen, weights = random(33, HIDDEN, seed=6), choose_unequally(33), random(33, 3).abs()
    found = kind(gate_up, down, ACTIVATION, biases)(x, chosen, weights)
    expected = reference(x, gate_up, down, chosen, weights, biases)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_one_expert_may_get_all_tokens(kind: Callable[..., Any]) -> None:
    gate_up, down = make_weights()
    x, chosen, weights = random(20, HIDDEN), torch.full((20, 1), 3), random(20, 1)
    found = kind(gate_up, down, ACTIVATION)(x, chosen, weights)
    torch.testing.assert_close(
        found.double(), reference(x, gate_up, down, chosen, weights), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_token_has_the_same_result_in_any_company(kind: Callable[..., Any]) -> None:
    """Integers make the GEMMs exact, so that only the order of the sums over experts could differ.

    Rows of NaN stand for the padding of a captured graph.
    """
    gate_up, down = ((weights * 2).round() for weights in make_weights())
    activation = ActivationFunction(BUILD, Activation.RELU2)
    x, chosen, weights = (random(40, HIDDEN) * 2).round(), choose_unequally(40), random(40, 3).abs()
    product = kind(gate_up, down, activation)
    together = product(x, chosen, weights)
    for token in range(40):
        own = slice(token, token + 1)
        assert torch.equal(product(x[own], chosen[own], weights[own]), together[own])
    x[25:], weights[25:] = NAN, NAN
    padded = product(x, chosen, weights)
    assert torch.equal(padded[:25], together[:25])
    assert padded[25:].isnan().all()


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_of_ranks_with_different_experts_add_up(kind: Callable[..., Any]) -> None:
    """Integers make all sums exact. One of the four ranks holds only an expert that no token has chosen."""
    gate_up, down = ((weights * 2).round() for weights in make_weights())
    activation = ActivationFunction(BUILD, Activation.RELU2)
    x, chosen = (random(30, HIDDEN) * 2).round(), choose_unequally(30)
    weights = (random(30, 3).abs() * 4).round()
    whole = kind(gate_up, down, activation)(x, chosen, weights)
    total = torch.zeros_like(whole)
    for held in (slice(0, 3), slice(3, 6), slice(6, 7), slice(7, 9)):
        count = held.stop - held.start
        indices = torch.full((9,), count)
        indices[held] = torch.arange(count)
        product = kind(gate_up[held], down[held], activation)
        part = product(x, indices[chosen], weights)
        alone = product(x[4:5], indices[chosen[4:5]], weights[4:5])
        assert torch.equal(alone, part[4:5])
        assert not part[(indices[chosen] == count).all(1)].any()
        total += part
    assert torch.equal(total, whole)


def test_other_devices_than_gpus_sort() -> None:
    assert isinstance(make_product(*make_weights(), ACTIVATION), SortedProduct)
    assert not GroupedProduct.supports(*make_weights(torch.bfloat16))


GRIDS = [(1, 1), (2, 1), (4, 1), (3, 3), (6, 3), (12, 3), (9, 9)]
"""Numbers of ranks, and of groups of ranks with different experts."""


@pytest.mark.parametrize(("ranks", "groups"), GRIDS)
@pytest.mark.parametrize("layout", ExpertLayout)
def test_every_element_of_all_layouts_is_on_one_rank(layout: ExpertLayout, ranks: int, groups: int) -> None:
    gate_up, down = make_weights()
    gate, up = gate_up.chunk(2, dim=1)
    names = EXPERTS.names
    tensors = {f"mlp.{names.stacked_gate_up}": gate_up, f"mlp.{names.stacked_down}": down}
    if layout is ExpertLayout.TRANSPOSED:
        tensors = {name: tensor.transpose(1, 2) for name, tensor in tensors.items()}
    for expert in range(9) if layout is ExpertLayout.SEPARATE else ():
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        tensors |= {f"mlp.experts.{expert}.{name}.weight": part[expert] for name, part in parts.items()}
    per_group, count = ranks // groups, EXPERTS.count // groups
    size = EXPERTS.width // per_group
    for rank in range(ranks):
        build = replace(BUILD, mesh=Mesh(Axis(rank, ranks), groups))
        weights = ExpertWeights(build, replace(EXPERTS, layout=layout), HIDDEN, "mlp.")
        for parameter in (weights.gate_up, weights.down):
            parameter.fill_(NAN)
        for target in weights.targets():
            tensor = tensors[target.name]
            assert tensor.shape == target.shape
            target.destination.copy_(tensor[target.shard])
        group, part = divmod(rank, per_group)
        held, own = slice(group * count, (group + 1) * count), slice(part * size, (part + 1) * size)
        assert torch.equal(weights.gate_up, torch.cat([gate[held, own], up[held, own]], dim=1))
        assert torch.equal(weights.down, down[held, :, own])
        chosen = torch.arange(9).view(3, 3)
        local = [min(expert - held.start, count) if expert >= held.start else count for expert in range(9)]
        assert weights.localize(chosen).flatten().tolist() == local
        assert weights.partial == (groups > 1)


@pytest.mark.parametrize(("ranks", "groups"), GRIDS)
def test_shards_of_alternating_gate_and_up_have_the_gate_first(ranks: int, groups: int) -> None:
    """The first rank of each group holds the biases of the down projections of its experts."""
    gate_up, down = make_weights()
    bias, down_bias = random(9, 16, seed=8), random(9, HIDDEN, seed=9)
    names, width = EXPERTS.names, EXPERTS.width
    pairs = torch.stack(gate_up.chunk(2, dim=1), dim=2)
    tensors = {
        names.stacked_gate_up: pairs.permute(0, 3, 1, 2),
        names.stacked_down: down.transpose(1, 2),
        names.stacked_gate_up_bias: torch.stack(bias.chunk(2, dim=1), dim=2),
        names.stacked_down_bias: down_bias,
    }
    experts = replace(EXPERTS, layout=ExpertLayout.TRANSPOSED, interleaved=True, biases=True)
    per_group, count = ranks // groups, EXPERTS.count // groups
    size = width // per_group
    for rank in range(ranks):
        weights = ExpertWeights(replace(BUILD, mesh=Mesh(Axis(rank, ranks), groups)), experts, HIDDEN, "")
        for target in weights.targets():
            assert tensors[target.name].shape == target.shape
            target.destination.copy_(tensors[target.name][target.shard])
        group, part = divmod(rank, per_group)
        held, own = slice(group * count, (group + 1) * count), slice(part * size, (part + 1) * size)
        rows = torch.cat([torch.arange(own.start, own.stop) + first for first in (0, width)])
        assert torch.equal(weights.gate_up, gate_up[held, rows])
        assert torch.equal(weights.down, down[held, :, own])
        assert weights.biases is not None
        assert torch.equal(weights.biases.gate_up, bias[held, rows])
        assert (weights.biases.down is None) == (part > 0)
        if weights.biases.down is not None:
            assert torch.equal(weights.biases.down, down_bias[held])
