# SPDX-License-Identifier: Apache-2.0
"""The router's kernel: compiled code, and the routers that it supports."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="this PyTorch comes without CUDA's bindings")
pytest.importorskip("triton", reason="this PyTorch comes without Triton")

from machine_code import disassemble

from mizzen.kernels import nvrtc
from mizzen.kernels.experts import route
from mizzen.kernels.experts.route import MAX_TOKENS, RouterKernel
from mizzen.kernels.experts.router import RoutingRules
from mizzen.layers.context import BuildContext
from mizzen.layers.experts.kernel_product import KernelRouter
from mizzen.layers.experts.router import ExpertRouter
from mizzen.models.experts_config import ExpertsConfig

RULES = RoutingRules(count=128, per_token=8, softmax=True)


def make_weight(count: int = 128, hidden: int = 2048, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(count, hidden, dtype=dtype, device="meta")


@pytest.mark.parametrize(("count", "hidden"), [(128, 2048), (256, 2048)])
def test_all_loads_of_a_thread_are_on_their_way_together(count: int, hidden: int, tmp_path: Path) -> None:
    kernel = RouterKernel(make_weight(count, hidden), replace(RULES, count=count), slice(0, count))
    cubin = nvrtc.compile_cubin(*kernel.spec(has_live=True), (9, 0))
    assert re.search(r"STACK:0 ", disassemble(cubin, tmp_path, "--dump-resource-usage"))
    code = disassemble(cubin, tmp_path, "--dump-sass")
    units = -(-hidden // (32 * route.WARPS))
    loads = re.findall("LDG.E.128", code[: code.index("HMMA")])
    assert len(loads) == units * (2 * kernel.m_tiles + 1)
    assert "STAS" in code and "REDUX.MAX" in code


def test_some_routers_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    def supports(weight: torch.Tensor, rules: RoutingRules = RULES, **biases: Any) -> bool:
        return RouterKernel.supports(weight, rules, biases.get("logit_bias"), biases.get("correction"))

    assert not supports(make_weight())
    monkeypatch.setattr(route, "is_hopper_or_later", lambda device: True)
    assert supports(make_weight())
    assert supports(make_weight(hidden=4096))
    assert supports(make_weight(256), replace(RULES, count=256))
    bias = torch.empty(128, device="meta")
    assert supports(make_weight(), logit_bias=bias, correction=bias)
    assert not supports(make_weight(), logit_bias=bias.bfloat16())
    assert not supports(make_weight(), correction=bias.bfloat16())
    assert not supports(make_weight(256, 4096), replace(RULES, count=256))
    for weight in (
        make_weight(dtype=torch.float32),
        make_weight(dtype=torch.float16),
        make_weight(hidden=2064),
        make_weight(hidden=7168),
        make_weight(hidden=4096)[:, :2048],
    ):
        assert not supports(weight)
    for rules in (replace(RULES, groups=4), replace(RULES, per_token=33), replace(RULES, count=6)):
        assert not supports(make_weight(rules.count), rules)


def test_a_router_whose_kernel_cannot_be_compiled_uses_others(monkeypatch: pytest.MonkeyPatch) -> None:
    build = BuildContext(device=torch.device("cpu"), dtype=torch.bfloat16)
    config = ExpertsConfig(count=8, per_token=2, width=8, layers=(True,))
    router = ExpertRouter(build, config, 64, "")
    assert KernelRouter(router).kernel is None
    monkeypatch.setattr(route, "is_hopper_or_later", lambda device: True)
    called: list[int] = []
    monkeypatch.setattr(KernelRouter, "__call__", lambda self, x, live=None: called.append(len(x)))
    for possible, sizes in ((True, [MAX_TOKENS + 1] * 2), (False, [1, 1, 9, 9])):
        monkeypatch.setattr(RouterKernel, "can_compile", lambda self, found=possible: found)
        kernels = KernelRouter(router, slice(2, 6))
        assert kernels.kernel is not None and kernels.kernel.held == slice(2, 6)
        called.clear()
        kernels.compile(torch.bfloat16)
        assert (kernels.kernel is not None) is possible
        assert called == sizes
