# SPDX-License-Identifier: Apache-2.0
"""Quantized experts use kernels that decode them if device, format, sizes, gate and plans allow it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="this PyTorch comes without Triton")

from mizzen.kernels import nvrtc
from mizzen.kernels.experts import coded_mma, coded_wgmma
from mizzen.kernels.experts.coded_mma import CodedMmaTile
from mizzen.kernels.experts.coded_wgmma import CodedWgmmaTile
from mizzen.kernels.experts.few_rows import FewRowsTile
from mizzen.kernels.experts.many_rows import ManyRowsTile
from mizzen.kernels.quantization.inputs import MAX_FEW_TOKENS
from mizzen.layers.activation import ActivationFunction, ClampedSwiGLU
from mizzen.layers.context import BuildContext
from mizzen.layers.experts import coded_kernel_plans, coded_kernel_product, kernel_product
from mizzen.layers.experts.biases import ExpertBiases
from mizzen.layers.experts.coded_kernel_plans import CodedFormat
from mizzen.layers.experts.coded_kernel_product import CodedKernelProduct, make_coded_product
from mizzen.layers.experts.kernel_plans import CodedMma, CodedWgmma, ExpertKernelPlan, FewRows, ManyRows
from mizzen.layers.experts.kernel_product import PlannedProduct
from mizzen.layers.experts.quantized_stack import QuantizedExperts
from mizzen.layers.quantized.canonical import Codes, QuantizedWeight
from mizzen.models.block import Activation
from mizzen.quantization.schemes import Activations, ActivationScales

EXPERTS, HIDDEN, WIDTH = 2, 64, 48
FEW = FewRows(FewRowsTile(4, 64, 4), FewRowsTile(4, 64, 4))
PLAN = ExpertKernelPlan(few_rows=FEW, few_tokens=8, grouped=(), library_rows=0, library_size=0)
COMPUTED = Activations(scales=ActivationScales.TOKEN_GROUP, group_size=128)
BUILD = BuildContext(device=torch.device("cpu"), dtype=torch.bfloat16)
SILU = ActivationFunction(BUILD, Activation.SILU)


def make_experts(rows: int, columns: int, codes: Codes, step: int) -> QuantizedExperts:
    per_byte = 2 if codes in (Codes.UINT4, Codes.E2M1) else 1
    values = torch.zeros(EXPERTS * rows, columns // per_byte, dtype=torch.uint8)
    scales = torch.ones(EXPERTS * rows, -(-columns // step))
    weight = QuantizedWeight(codes=codes, values=values, scales=scales, column_step=step)
    return QuantizedExperts(weight=weight, rows=rows)


def make_weights(codes: Codes = Codes.E4M3, step: int = 16, *, down: Codes = Codes.E4M3) -> Any:
    gate_up = make_experts(2 * WIDTH, HIDDEN, codes, step)
    return SimpleNamespace(
        gate_up=gate_up, down=make_experts(HIDDEN, WIDTH, down, step), biases=None, dtype=torch.bfloat16
    )


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all devices Hopper GPUs, for which only FP8 with scales of blocks has a plan."""
    monkeypatch.setattr(coded_kernel_product, "has_wgmma", lambda device: True)
    monkeypatch.setattr(coded_kernel_plans, "CODED_PLANS", {CodedFormat(Codes.E4M3, by_row=False): PLAN})


def choose(weights: Any, activation: Any = SILU) -> CodedKernelProduct | None:
    library: Any = None
    return make_coded_product(weights, activation, library, experts=4)


@pytest.mark.usefixtures("hopper")
def test_a_format_with_a_plan_is_decoded_in_registers() -> None:
    product = choose(make_weights())
    assert product is not None
    assert product.plan is PLAN and product.dtype == torch.bfloat16
    assert (product.sizes.experts, product.sizes.hidden, product.sizes.width) == (4, HIDDEN, WIDTH)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "weights",
    [
        make_weights(Codes.INT8, down=Codes.INT8),
        make_weights(step=HIDDEN),
        make_weights(down=Codes.INT8),
        make_weights(step=8),
        make_weights(step=24),
    ],
    ids=["no plan", "no plan for rows", "different formats", "narrow steps", "steps that cross tiles"],
)
def test_other_formats_use_older_products(weights: Any) -> None:
    assert choose(weights) is None


@pytest.mark.usefixtures("hopper")
def test_orders_of_columns_use_older_products() -> None:
    weights = make_weights()
    weights.down = replace(weights.down, orders=torch.zeros(EXPERTS, WIDTH, dtype=torch.int32))
    assert choose(weights) is None


@pytest.mark.usefixtures("hopper")
def test_a_shard_with_one_scale_for_a_row_has_the_plan_of_its_blocks() -> None:
    weights = make_weights(step=32)
    weights.down = make_experts(HIDDEN, 32, Codes.E4M3, 32)
    assert choose(weights) is not None


@pytest.mark.usefixtures("hopper")
def test_gates_without_kernels_use_older_products() -> None:
    assert choose(make_weights(), ClampedSwiGLU(7.0, 1.702)) is not None
    assert choose(make_weights(), ActivationFunction(BUILD, Activation.RELU2)) is None


def test_other_devices_use_older_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_kernel_plans, "CODED_PLANS", {CodedFormat(Codes.E4M3, by_row=False): PLAN})
    assert choose(make_weights()) is None


@pytest.mark.usefixtures("hopper")
def test_small_batches_use_mma_if_the_kernel_supports_the_weights_and_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tile = CodedMmaTile(1, 1, 2, 1, 1, 2, 1)
    plan = replace(PLAN, coded_mma=((1.0, CodedMma(tile, tile)),))
    plans = {CodedFormat(Codes.E2M1, by_row=False): plan}
    monkeypatch.setattr(coded_kernel_plans, "CODED_PLANS", plans)
    weights = make_weights(Codes.E2M1, 32, down=Codes.E2M1)
    weights.down = make_experts(HIDDEN, 64, Codes.E2M1, 32)
    product = choose(weights)
    assert product is not None and not product.plan.coded_mma
    monkeypatch.setattr(coded_mma, "has_wgmma", lambda device: True)
    weights.gate_up = make_experts(128, HIDDEN, Codes.E2M1, 32)
    product = choose(weights)
    assert product is not None and product.plan is plan
    compiled: list[int] = []
    monkeypatch.setattr(PlannedProduct, "compile", lambda self, per_token, adds: compiled.append(per_token))
    for possible in (True, False):
        monkeypatch.setattr(coded_kernel_product, "can_compile_all", lambda *_, found=possible: found)
        product.compile(2, adds=False)
        assert bool(product.plan.coded_mma) is possible
    assert compiled == [2, 2]


@pytest.mark.usefixtures("hopper")
def test_large_batches_round_inputs_if_the_format_does(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(PLAN, many_rows=((4.0, ManyRows(ManyRowsTile(128, 4))),))
    monkeypatch.setattr(coded_kernel_plans, "CODED_PLANS", {CodedFormat(Codes.E4M3, by_row=False): plan})
    sizes: dict[str, Any] = {"codes": Codes.E4M3, "step": 128}
    for hidden, width, activations, served in (
        (256, 384, COMPUTED, True),
        (256, 384, None, False),
        (256, 320, COMPUTED, False),
    ):
        gate_up, down = make_experts(2 * width, hidden, **sizes), make_experts(hidden, width, **sizes)
        for each in (gate_up, down):
            each.weight.activations = activations
        product = choose(SimpleNamespace(gate_up=gate_up, down=down, biases=None, dtype=torch.bfloat16))
        assert product is not None
        assert (product.plan is plan) is served and (product.many_rows is not None) is served
        assert bool(product.plan.many_rows) is served


@pytest.mark.usefixtures("hopper")
def test_large_batches_use_other_kernels_if_theirs_cannot_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = replace(PLAN, many_rows=((4.0, ManyRows(ManyRowsTile(128, 4))),))
    monkeypatch.setattr(coded_kernel_plans, "CODED_PLANS", {CodedFormat(Codes.E4M3, by_row=False): plan})
    gate_up, down = make_experts(512, 256, Codes.E4M3, 128), make_experts(256, 256, Codes.E4M3, 128)
    for each in (gate_up, down):
        each.weight.activations = COMPUTED
    product = choose(SimpleNamespace(gate_up=gate_up, down=down, biases=None, dtype=torch.bfloat16))
    assert product is not None and product.plan is plan
    monkeypatch.setattr(PlannedProduct, "run", lambda self, *_, **__: None)
    quantized: list[int] = []
    monkeypatch.setattr(CodedKernelProduct, "many_rows_inputs", lambda self, x: quantized.append(len(x)))
    for possible in (True, False):
        monkeypatch.setattr(kernel_product, "can_compile_all", lambda *_, found=possible: found)
        product.compile(2, adds=False)
        assert bool(product.plan.many_rows) is possible
    assert quantized == [MAX_FEW_TOKENS + 1]  # few tokens have a kernel of their own


def test_a_kernel_that_cannot_be_compiled_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise ImportError("no compiler")

    cpu, kernels = torch.device("cpu"), [frozenset({(("", name, ()), 7)}) for name in "abc"]
    monkeypatch.setattr(nvrtc, "compile_in_parallel", refuse)
    monkeypatch.setattr(nvrtc, "load_kernel", refuse)
    assert not nvrtc.can_compile_all(kernels[0], cpu, "others run")
    assert not nvrtc.can_compile_all(kernels[0], cpu, "others run")
    assert caplog.text.count("no compiler") == 1
    monkeypatch.setattr(nvrtc, "compile_in_parallel", lambda *_: None)
    monkeypatch.setattr(nvrtc, "load_kernel", lambda source, name, defines, device: name)
    allowed: list[tuple[str, int]] = []
    monkeypatch.setattr(nvrtc, "allow_shared_memory", lambda *call: allowed.append(call))
    assert nvrtc.can_compile_all(kernels[1], cpu, "others run")
    assert allowed == [("b", 7)]
    monkeypatch.setattr(nvrtc, "allow_shared_memory", refuse)
    assert not nvrtc.can_compile_all(kernels[2], cpu, "others run")


@pytest.mark.usefixtures("hopper")
def test_variants_replace_those_before_them_that_do_not_support_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coded_mma, "has_wgmma", lambda device: True)
    small, tile = CodedMma(*[CodedMmaTile(1, 1, 2, 1, 1, 2, 1)] * 2), CodedWgmmaTile(1, 3, 2, 2)
    entries = ((0.5, small), (2.0, CodedWgmma(tile)), (1.0, small))
    plan = replace(PLAN, coded_mma=entries)
    monkeypatch.setattr(coded_kernel_plans, "CODED_PLANS", {CodedFormat(Codes.E2M1, by_row=False): plan})
    weights = make_weights(Codes.E2M1, 32, down=Codes.E2M1)
    weights.gate_up, weights.down = (
        make_experts(128, 64, Codes.E2M1, 32),
        make_experts(64, 64, Codes.E2M1, 32),
    )
    product = choose(weights)
    assert product is not None and product.plan.coded_mma == (entries[0], entries[2])
    monkeypatch.setattr(coded_wgmma, "has_wgmma", lambda device: True)
    monkeypatch.setattr(CodedWgmmaTile, "fits", lambda self, hidden, width: (hidden, width) == (64, 64))
    product = choose(weights)
    assert product is not None and product.plan.coded_mma == entries[:2]
    names = [spec[1] for spec, _ in product.mma_kernels(CodedWgmma(tile), 2, adds=False)]
    assert names == ["coded_inputs", "coded_wgmma"]
    monkeypatch.setattr(CodedWgmmaTile, "fits", lambda self, hidden, width: False)
    product = choose(weights)
    assert product is not None and product.plan.coded_mma == (entries[0], entries[2])


@pytest.mark.usefixtures("hopper")
def test_wgmma_multiplies_all_pairs_with_both_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    product = choose(make_weights())
    assert product is not None
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(coded_wgmma, "multiply_pairs", lambda *call: calls.append(call))
    x, chosen, tile = torch.zeros(1, HIDDEN), torch.zeros(1, 2, dtype=torch.int64), CodedWgmmaTile(1, 3, 2, 2)
    product.run_coded_mma(CodedWgmma(tile), x, chosen)
    assert calls == [(x, chosen, product.gate_up, product.down, product.gate, tile, None, None)]


@pytest.mark.usefixtures("hopper")
def test_wgmma_adds_no_biases_of_down_that_another_rank_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights()
    weights.biases = ExpertBiases(torch.ones(EXPERTS, 2 * WIDTH), None)
    product = choose(weights)
    assert product is not None
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(coded_wgmma, "multiply_pairs", lambda *call: calls.append(call))
    x, chosen = torch.zeros(1, HIDDEN), torch.zeros(1, 2, dtype=torch.int64)
    product.run_coded_mma(CodedWgmma(CodedWgmmaTile(1, 3, 2, 2)), x, chosen)
    gate_up_bias, down_bias = calls[0][-2:]
    assert gate_up_bias is weights.biases.gate_up
    assert torch.equal(down_bias, torch.zeros(EXPERTS, HIDDEN))
