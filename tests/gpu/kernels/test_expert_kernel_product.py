# SPDX-License-Identifier: Apache-2.0
"""Products by kernels of experts equal a loop in float64, and do not change in company or in CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hopper import on_hopper

from mizzen.layers.activation import ActivationFunction
from mizzen.layers.context import BuildContext
from mizzen.layers.experts.products import GroupedProduct, SortedProduct
from mizzen.layers.experts.router import ExpertRouter
from mizzen.models.block import Activation
from mizzen.models.experts_config import ExpertsConfig

if TYPE_CHECKING:
    from mizzen.layers.experts.kernel_product import KernelProduct

pytestmark = on_hopper("triton", "Triton")
CUDA = torch.device("cuda")
COUNT, PER_TOKEN, HIDDEN, WIDTH = 33, 5, 2048, 768
NAN = float("nan")
Weights = tuple[torch.Tensor, torch.Tensor, ActivationFunction]
VARIANTS = range(7)
"""Indices of the variants of `HOPPER_PLAN`, and of the library behind them."""


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda") * shape[-1] ** -0.5


@pytest.fixture(scope="module")
def weights() -> Weights:
    gate_up, down = random(COUNT, 2 * WIDTH, HIDDEN, seed=1), random(COUNT, HIDDEN, WIDTH, seed=2)
    activation = ActivationFunction(
        BuildContext(device=CUDA, dtype=torch.bfloat16, fused=True), Activation.SILU
    )
    return gate_up.bfloat16(), down.bfloat16(), activation


@pytest.fixture(scope="module")
def router() -> ExpertRouter:
    experts = ExpertsConfig(count=COUNT, per_token=PER_TOKEN, width=WIDTH, layers=(True,))
    made = ExpertRouter(BuildContext(device=CUDA, dtype=torch.bfloat16), experts, HIDDEN, "")
    made.weight.copy_(random(COUNT, HIDDEN, seed=3) * 16)
    return made


def make_inputs(tokens: int) -> torch.Tensor:
    return (random(tokens, HIDDEN, seed=tokens) * HIDDEN**0.5).bfloat16()


def make_kernels(weights: Weights) -> KernelProduct:
    from mizzen.layers.experts.kernel_product import KernelProduct

    return KernelProduct(*weights, None, GroupedProduct(*weights), experts=COUNT)


@pytest.mark.parametrize("tokens", [1, 7, 33, 600])
@pytest.mark.parametrize("index", VARIANTS)
def test_products_equal_that_of_the_cpu(
    index: int, tokens: int, weights: Weights, router: ExpertRouter
) -> None:
    from mizzen.layers.experts.kernel_plans import Library

    product = make_kernels(weights)
    x = make_inputs(tokens)
    chosen, factors = router(x)
    gate_up, down, _ = weights
    plain = ActivationFunction(BuildContext(device=CUDA, dtype=torch.float64), Activation.SILU)
    exact = SortedProduct(gate_up.double(), down.double(), plain)
    expected = exact(x.double(), chosen, factors.double()).float()
    variant = (*product.plan.variants, Library())[index]
    found = product.run(x, chosen, factors, variant=variant, added=x)
    expected += x.float()
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02 * expected.abs().max().item())
    assert torch.equal(product.run(x, chosen, factors, variant=variant, added=x), found)
    row = tokens // 2
    alone = [tensor[row : row + 1] for tensor in (x, chosen, factors)]
    if not isinstance(variant, Library):  # the library's GEMMs of different sizes round differently
        assert torch.equal(product.run(*alone, variant=variant, added=x[row : row + 1])[0], found[row])


@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_router_and_product_run_in_a_graph(tokens: int, weights: Weights, router: ExpertRouter) -> None:
    from mizzen.layers.experts.kernel_product import ExpertKernels, KernelRouter

    kernels = ExpertKernels(KernelRouter(router), make_kernels(weights))
    kernels.compile(adds=True)

    def run(inputs: torch.Tensor) -> torch.Tensor:
        return kernels.product.run(inputs, *kernels.router(inputs), added=inputs)

    x, y = make_inputs(tokens), make_inputs(tokens + 1)[:tokens]
    expected = run(y)
    assert torch.equal(kernels.router(y)[0], router(y)[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(x)
    for padding in (0.0, NAN, 1.0):
        x.copy_(y)
        x[tokens - tokens // 4 :] = padding
        graph.replay()
        live = tokens - tokens // 4
        assert torch.equal(found[:live], expected[:live])


@pytest.mark.parametrize("index", VARIANTS)
def test_padding_of_a_graph_goes_to_no_expert(index: int, weights: Weights, router: ExpertRouter) -> None:
    """Experts that no live row has chosen hold NaN while the graph runs."""
    from mizzen.layers.experts.kernel_plans import Library
    from mizzen.layers.experts.kernel_product import KernelRouter

    gate_up, down, activation = weights
    copies = gate_up.clone(), down.clone(), activation
    kernel_router, product = KernelRouter(router), make_kernels(copies)
    variant = (*product.plan.variants, Library())[index]
    x, live = make_inputs(8), torch.ones(8, dtype=torch.bool, device="cuda")

    def run() -> torch.Tensor:
        return product.run(x, *kernel_router(x, live), variant=variant, added=x)

    whole = run().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for count in (5, 1, 0):
        live.copy_(torch.arange(8, device="cuda") < count)
        chosen, factors = kernel_router(x, live)
        assert (chosen[count:] == COUNT).all() and not factors[count:].any()
        unused = [expert for expert in range(COUNT) if not (chosen == expert).any()]
        assert unused
        copies[0].copy_(gate_up)
        copies[1].copy_(down)
        copies[0][unused], copies[1][unused] = NAN, NAN
        graph.replay()
        torch.testing.assert_close(found[:count], whole[:count], rtol=0.02, atol=0.02)
        assert torch.equal(found[count:], x[count:])
