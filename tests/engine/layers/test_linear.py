# SPDX-License-Identifier: Apache-2.0
"""Linear layers: a GEMM that adds to the residual stream equals a GEMM followed by an addition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from msgspec.structs import replace

from mizzen.core.sampling_params import SamplingParams
from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.execution.step import StepExecutor
from mizzen.engine.loading import model_setup
from mizzen.engine.loading.memory_profile import build_largest_plan
from mizzen.engine.uploader import Uploader
from mizzen.layers import linear
from mizzen.layers.context import BuildContext
from mizzen.layers.linear import MIN_FUSED_ADD_ROWS, RowParallelLinear
from mizzen.layers.linear_methods.base import LinearMethod, LinearSpec
from mizzen.layers.linear_methods.small_batch import SmallBatchLinear
from mizzen.layers.linear_methods.unquantized import UnquantizedLinear
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.registry import read_config


class FirstOfTwoRanks:
    """The first of two ranks, with only the attributes that layers read."""

    size, rank = 2, 0


def layer(*, bias: bool = False, fused: bool = True, **build: object) -> RowParallelLinear:
    context = BuildContext(device=torch.device("cpu"), dtype=torch.float64, fused=fused, **build)  # type: ignore[arg-type]
    linear = RowParallelLinear(context, "down_proj", 24, 40, bias)
    generator = torch.Generator().manual_seed(0)
    linear.method.weight.normal_(generator=generator)  # type: ignore[attr-defined]
    return linear


def test_large_batches_are_added_to_the_residual_in_place() -> None:
    down = layer()
    for count in (1, MIN_FUSED_ADD_ROWS - 1, MIN_FUSED_ADD_ROWS, MIN_FUSED_ADD_ROWS + 7):
        x, residual = torch.randn(count, 40, dtype=torch.float64), torch.randn(count, 24, dtype=torch.float64)
        expected, original = residual + down(x), residual.clone()
        term = down.add_to_residual(residual, x)
        if count < MIN_FUSED_ADD_ROWS:
            assert term is not None and torch.equal(residual, original)
            residual = residual + term
        else:
            assert term is None
        torch.testing.assert_close(residual, expected)


@pytest.mark.parametrize(
    "build",
    [{"bias": True}, {"fused": False}, {"collectives": FirstOfTwoRanks()}],
    ids=["with bias", "not fused", "several ranks"],
)
def test_layers_that_cannot_fuse_the_addition_return_a_term(build: dict[str, object]) -> None:
    down = layer(**build)  # type: ignore[arg-type]
    residual = torch.zeros(2 * MIN_FUSED_ADD_ROWS, 24, dtype=torch.float64)
    term = down.add_to_residual(residual, torch.ones(2 * MIN_FUSED_ADD_ROWS, 40, dtype=torch.float64))
    assert term is not None and term.shape == residual.shape
    assert not residual.any()


def test_a_layer_with_a_bias_can_add_its_product_without_it() -> None:
    down = layer(bias=True)
    down.method.bias.fill_(5)  # type: ignore[union-attr]
    count = MIN_FUSED_ADD_ROWS
    x, residual = torch.randn(count, 40, dtype=torch.float64), torch.randn(count, 24, dtype=torch.float64)
    expected, original = residual + down(x) - 5, residual.clone()
    assert not down.add_without_bias(residual[1:], x[1:])
    assert torch.equal(residual, original)
    assert down.add_without_bias(residual, x)
    torch.testing.assert_close(residual, expected)


class AdaptedLinear(LinearMethod):
    """A linear method whose result is not just a GEMM with its weight, as with an adapter."""

    def __init__(self, spec: LinearSpec) -> None:
        self.inner = UnquantizedLinear(spec)
        self.weight = self.inner.weight

    def targets(self) -> Iterator[WeightTarget]:
        return self.inner.targets()

    def permute_rows(self, order: torch.Tensor) -> None:
        self.inner.permute_rows(order)

    def scale_rows(self, rows: slice, factor: float, *, bias: bool = True) -> None:
        self.inner.scale_rows(rows, factor, bias=bias)

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner.apply(x, out) + 1000


def test_other_linear_methods_are_never_bypassed() -> None:
    down = layer(make_linear=AdaptedLinear)
    residual = torch.zeros(MIN_FUSED_ADD_ROWS, 24, dtype=torch.float64)
    term = down.add_to_residual(residual, torch.zeros(MIN_FUSED_ADD_ROWS, 40, dtype=torch.float64))
    assert term is not None and (term == 1000).all()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fused_additions_leave_a_models_residual_stream_unchanged(
    family: str, kit: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The final hidden states are compared after steps in which no, all or some additions are fused.

    After the last attention, only the 5 sampled rows remain, so no addition is fused there if the minimum is
    6 rows.
    """
    kit.save_model(tmp_path, family)
    options = EngineOptions(
        model=str(tmp_path), device="cpu", max_running_requests=5, prefill_chunk_tokens=64, page_size=4
    )
    config, plan = read_config(tmp_path), build_largest_plan(options, 64)
    starts = (replace(start, sampling=SamplingParams(temperature=0), options=None) for start in plan.starts)
    plan = replace(plan, starts=tuple(starts))
    model = model_setup.make_model(options, config, lambda done, total: None)
    attention = model_setup.make_attention_with_kv(
        model, 4, len(plan.pages.pages), prefill="reference", decode="reference"
    )
    row_parallel = [
        linear_layer for layer in model.layers for linear_layer in (layer.attention.o_proj, layer.mlp.down)
    ]
    assert len(row_parallel) == 2 * config.layers
    streams: list[torch.Tensor] = []
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden, *out: streams.append(hidden) or logits(hidden, *out))
    assert not any(linear_layer.fuses_add for linear_layer in row_parallel)  # not on a CPU
    for linear_layer in row_parallel:
        linear_layer.fuses_add = True
    for min_rows in (1000, 1, 6):  # fused: no layer, every layer, every layer except after the last attention
        monkeypatch.setattr(linear, "MIN_FUSED_ADD_ROWS", min_rows)
        state = SlotState(5, 16, Uploader(torch.device("cpu")), vocab=config.vocab_size)
        with torch.inference_mode():
            StepExecutor(model, attention, state, Uploader(torch.device("cpu")))(plan)
    unfused, fused, partly_fused = streams
    assert unfused.shape == (5, config.hidden_size)
    torch.testing.assert_close(fused, unfused)
    torch.testing.assert_close(partly_fused, unfused)


def test_fused_swiglu_is_disabled_only_inside_the_context_manager(
    kit: SimpleNamespace, tmp_path: Path
) -> None:
    kit.save_model(tmp_path, "llama")
    options = EngineOptions(model=str(tmp_path), device="cpu")
    model = model_setup.make_model(options, read_config(tmp_path), lambda done, total: None)
    methods = []
    for layer in model.layers:
        spec = cast(UnquantizedLinear, layer.mlp.gate_up.method).spec
        method = SmallBatchLinear(spec)
        layer.mlp.gate_up.method = method
        methods.append(method)
    methods[0].supports_prefill_swiglu = methods[0].fuses_prefill_swiglu = True
    with pytest.raises(RuntimeError), model.without_fused_swiglu():
        assert not any(method.fuses_prefill_swiglu for method in methods)
        raise RuntimeError
    assert methods[0].fuses_prefill_swiglu
    assert not any(method.fuses_prefill_swiglu for method in methods[1:])
