# SPDX-License-Identifier: Apache-2.0
"""Attention sinks and the clamped gate in dense blocks equal the functions of gpt-oss in Transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from logits_check import assert_equal
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, eager_attention_forward

from mizzen.attention import flashinfer
from mizzen.attention.base import Geometry, KVSpec
from mizzen.layers.activation import make_activation
from mizzen.layers.context import BuildContext
from mizzen.models import registry
from mizzen.models.block import Activation, BlockConfig, TensorNames
from mizzen.models.config import ModelConfig
from mizzen.models.families import llama
from mizzen.models.hf_fields import Fields

LIMIT = 0.05
"""Limit of the gate; so low that many values of the twin exceed it."""


def parse_config(fields: Fields) -> ModelConfig:
    """Read a Llama model's config.json, as a model with attention sinks and a clamped gate."""
    config = llama.parse_config(fields)
    block = replace(
        config.block, attention_sinks=True, activation=Activation.CLAMPED_SWIGLU, gate_limit=LIMIT
    )
    return replace(config, block=block)


def add_sinks_and_gate(model: Any) -> None:
    """Give each layer of a Transformers model attention sinks, and the gate of gpt-oss."""
    AttentionInterface.register("eager_with_sinks", eager_attention_forward)
    AttentionMaskInterface.register("eager_with_sinks", eager_mask)
    model.set_attn_implementation("eager_with_sinks")
    settings = SimpleNamespace(alpha=1.702, limit=LIMIT)
    generator = torch.Generator().manual_seed(5)
    for layer in model.model.layers:
        heads = model.config.num_attention_heads
        layer.self_attn.sinks = torch.nn.Parameter(torch.randn(heads, generator=generator))
        mlp = layer.mlp

        def forward(x: torch.Tensor, mlp: Any = mlp) -> torch.Tensor:
            pairs = torch.stack((mlp.gate_proj(x), mlp.up_proj(x)), dim=-1).flatten(-2)
            return mlp.down_proj(GptOssExperts._apply_gate(settings, pairs))  # type: ignore[arg-type]

        mlp.forward = forward


@pytest.fixture
def twin(kit: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Transformers model with sinks and the clamped gate, whose checkpoint is in `tmp_path`."""
    monkeypatch.setitem(registry.READERS, llama.ARCHITECTURE, parse_config)
    model = kit.save_model(tmp_path, "llama", sliding_window=None)
    add_sinks_and_gate(model)
    [path] = tmp_path.glob("*.safetensors")
    sinks = {
        f"model.layers.{index}.self_attn.sinks": layer.self_attn.sinks.detach()
        for index, layer in enumerate(model.model.layers)
    }
    save_file(load_file(path) | sinks, path)
    return model


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_sinks_and_the_clamped_gate_equal_transformers(
    backend: str, kit: SimpleNamespace, twin: Any, tmp_path: Path
) -> None:
    bench, prompt = kit.Bench(tmp_path, backend), kit.tokens(45, seed=1)
    expected = kit.oracle(twin, np.concatenate([prompt, kit.tokens(2, seed=3)]))
    whole = bench.logits(bench.plan([], [(0, 0, prompt, True)], (kit.greedy(0),)))
    assert_equal(whole, expected[:45])
    starts = (kit.greedy(1),)
    for begin, end in ((0, 7), (7, 30), (30, 45)):
        part = bench.logits(bench.plan([], [(1, begin, prompt[begin:end], end == 45)], starts))
        assert_equal(part, expected[begin:end])
        starts = ()
    for index, token in enumerate(kit.tokens(2, seed=3)):
        bench.state.last_tokens[[0, 1]] = int(token)
        rows = bench.logits(bench.plan([0, 1], []))
        assert_equal(rows, expected[[45 + index] * 2])


def test_sinks_change_the_result(kit: SimpleNamespace, twin: Any, tmp_path: Path) -> None:
    prompt = kit.tokens(20, seed=1)
    with_sinks = kit.oracle(twin, prompt)
    for layer in twin.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)
    assert not torch.allclose(with_sinks, kit.oracle(twin, prompt), atol=1e-2)


def test_flashinfer_refuses_attention_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "find_unmet_requirement", lambda *args, **options: None)
    geometry = Geometry(heads=8, kv_heads=2, head_dim=128, windows=(None,), has_sinks=True)
    kv = KVSpec(torch.device("cpu"), torch.bfloat16)
    assert flashinfer.unsupported_reason(geometry, kv) == "it does not support attention sinks"


def test_a_clamped_gate_needs_a_gate() -> None:
    block = BlockConfig(activation=Activation.CLAMPED_SWIGLU, names=TensorNames(gate_up=("up_proj",)))
    build = BuildContext(device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ValueError, match="clamped_swiglu needs a gate"):
        make_activation(build, block, "model.layers.0.mlp.")
