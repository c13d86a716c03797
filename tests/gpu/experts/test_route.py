# SPDX-License-Identifier: Apache-2.0
"""The router's kernel chooses the experts that the router itself chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mizzen.kernels.experts.route import MAX_TOKENS, RouterKernel
from mizzen.layers.context import BuildContext
from mizzen.layers.experts.kernel_product import KernelRouter, make_rules
from mizzen.layers.experts.router import ExpertRouter
from mizzen.models.experts_config import ExpertsConfig, Scoring

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9,
        reason="needs a Hopper GPU",
    ),
    pytest.mark.usefixtures("poisoned_buffers"),
]
CONFIG = ExpertsConfig(count=128, per_token=8, width=8, layers=(True,))
ROUTERS: dict[str, tuple[int, dict[str, Any]]] = {
    "softmax": (2048, {}),
    "biased": (2880, {"count": 32, "per_token": 4, "router_bias": True}),
    "sigmoid": (512, {"scoring": Scoring.SIGMOID, "correction_bias": True, "scale": 2.5, "count": 40}),
    "plain": (1056, {"renormalize": False, "scale": 1.5, "count": 250, "per_token": 10}),
    "floor": (96, {"correction_bias": True, "sum_floor": 0.9, "count": 9}),
    "all": (32, {"count": 5, "per_token": 5}),
}


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


def make_router(kind: str) -> ExpertRouter:
    hidden, options = ROUTERS[kind]
    build = BuildContext(device=torch.device("cuda"), dtype=torch.bfloat16)
    router = ExpertRouter(build, replace(CONFIG, **options), hidden, "")
    router.weight.copy_(normal(*router.weight.shape, seed=8) / hidden**0.5)
    for bias, seed in ((router.bias, 9), (router.logit_bias, 10)):
        if bias is not None:
            bias.copy_(normal(len(bias), seed=seed) / 2)
    return router


@pytest.mark.parametrize("tokens", [1, 8, 61, MAX_TOKENS])
@pytest.mark.parametrize("kind", ROUTERS)
def test_experts_are_chosen_as_by_the_router(kind: str, tokens: int) -> None:
    """Rows of equal logits, of large ones and of NaN are among the tokens."""
    router = make_router(kind)
    # The logits do not depend on the order of sums.
    router.weight.copy_((router.weight * 64).round() / 64)
    x = (normal(tokens, router.weight.shape[1], seed=11) * 8).round().clamp(-16, 16) / 8
    for row, value in ((3, 0.0), (5, 1e4), (7, float("nan"))):
        x[row : row + 1] = value
    kernels = KernelRouter(router)
    assert kernels.kernel is not None and kernels.kernel.can_compile()
    chosen, weights = kernels(x)
    expected_chosen, expected_weights = router(x)
    assert torch.equal(chosen, expected_chosen)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_token_has_the_same_experts_in_any_batch(kind: str) -> None:
    router = make_router(kind)
    kernels, x = KernelRouter(router), normal(90, router.weight.shape[1], seed=3)
    x[:40] = float("nan")
    whole = kernels(x)
    for tokens in (1, 10):
        part = kernels(x[-tokens:])
        assert torch.equal(part[0], whole[0][-tokens:]) and torch.equal(part[1], whole[1][-tokens:])


def test_experts_of_other_ranks_and_padding_rows_are_not_held() -> None:
    router = make_router("sigmoid")
    x, live = normal(9, router.weight.shape[1], seed=4), torch.arange(9, device="cuda") % 3 > 0
    chosen, weights = KernelRouter(router)(x)
    held = (chosen >= 8) & (chosen < 24) & live[:, None]
    found, factors = KernelRouter(router, slice(8, 24))(x, live)
    assert held.any() and not held.all()
    assert torch.equal(found, torch.where(held, chosen - 8, 16))
    assert torch.equal(factors, torch.where(held, weights, 0.0))


def test_other_routers_are_not_supported() -> None:
    router = make_router("softmax")
    rules, weight = make_rules(router), router.weight
    assert RouterKernel.supports(weight, rules, None, None)
    for other in (weight.half(), weight.float(), weight[:, :2040].contiguous(), weight.repeat(1, 4)):
        assert not RouterKernel.supports(other, rules, None, None)
    assert not RouterKernel.supports(weight, replace(rules, groups=4), None, None)
    assert not RouterKernel.supports(weight, replace(rules, count=520), None, None)
    with pytest.raises(ValueError, match=f"{MAX_TOKENS + 1} tokens"):
        RouterKernel(weight, rules, slice(0, 128))(weight.new_zeros(MAX_TOKENS + 1, 2048))
