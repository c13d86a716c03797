# SPDX-License-Identifier: Apache-2.0
"""Products of experts on a GPU equal that of the CPU in float64, eager and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mizzen.layers.activation import ActivationFunction
from mizzen.layers.context import BuildContext
from mizzen.layers.experts.products import (
    GROUPED_CAPABILITY,
    GroupedProduct,
    MaskedProduct,
    SortedProduct,
    make_product,
)
from mizzen.layers.experts.router import ExpertRouter
from mizzen.models.block import Activation
from mizzen.models.experts_config import ExpertsConfig

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]
HAS_GROUPED = GPU and torch.cuda.get_device_capability() >= GROUPED_CAPABILITY
HIDDEN, WIDTH, COUNT = 256, 96, 33
NAN = float("nan")
UNFUSED = BuildContext(device=torch.device("cuda"), dtype=torch.float64)
KINDS = [
    pytest.param(GroupedProduct, marks=pytest.mark.skipif(not HAS_GROUPED, reason="needs a Hopper GPU")),
    MaskedProduct,
]


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda") * shape[-1] ** -0.5


def make_weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, ActivationFunction]:
    gate_up, down = random(COUNT, 2 * WIDTH, HIDDEN, seed=1), random(COUNT, HIDDEN, WIDTH, seed=2)
    build = BuildContext(device=torch.device("cuda"), dtype=dtype, fused=True)
    return gate_up.to(dtype), down.to(dtype), ActivationFunction(build, Activation.SILU)


def make_router(dtype: torch.dtype) -> ExpertRouter:
    experts = ExpertsConfig(count=COUNT, per_token=5, width=WIDTH, layers=(True,))
    router = ExpertRouter(BuildContext(device=torch.device("cuda"), dtype=dtype), experts, HIDDEN, "")
    router.weight.copy_(random(COUNT, HIDDEN, seed=3) * 16)
    return router


def make_inputs(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return (random(tokens, HIDDEN, seed=tokens) * 16).to(dtype)


@pytest.mark.parametrize("tokens", [1, 4, 64, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_that_of_the_cpu(kind: Callable[..., Any], tokens: int) -> None:
    gate_up, down, activation = make_weights(torch.bfloat16)
    x = make_inputs(tokens, torch.bfloat16)
    chosen, weights = make_router(torch.bfloat16)(x)
    exact = SortedProduct(gate_up.double(), down.double(), ActivationFunction(UNFUSED, Activation.SILU))
    expected = exact(x.double(), chosen, weights.double()).float()
    unused = [expert for expert in range(COUNT) if not (chosen == expert).any()]
    gate_up[unused], down[unused] = NAN, NAN
    found = kind(gate_up, down, activation)(x, chosen, weights)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
def test_padding_of_a_graph_does_not_reach_other_rows(kind: Callable[..., Any]) -> None:
    router, product = make_router(torch.bfloat16), kind(*make_weights(torch.bfloat16))
    x = make_inputs(8, torch.bfloat16)
    product(x, *router(x))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(x, *router(x))
    for padding in (0.0, NAN, 1.0):
        x.copy_(make_inputs(8, torch.bfloat16).flip(0))
        eager = product(x, *router(x))
        x[5:] = padding
        graph.replay()
        assert torch.equal(found[:5], eager[:5])


@pytest.mark.skipif(not HAS_GROUPED, reason="needs a Hopper GPU")
def test_products_are_chosen_by_type_and_size() -> None:
    gate_up, down, activation = make_weights(torch.bfloat16)
    assert isinstance(make_product(gate_up, down, activation), GroupedProduct)
    assert isinstance(make_product(gate_up.half(), down.half(), activation), MaskedProduct)
    narrow = make_product(gate_up[:, : 2 * 92], down[..., :92].contiguous(), activation)
    assert isinstance(narrow, MaskedProduct)
