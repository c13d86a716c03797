# SPDX-License-Identifier: Apache-2.0
"""Fields of Phi-3.5-MoE: the factors of its rotary embedding by the served context, its names, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mizzen.layers.rope import RotaryEmbedding
from mizzen.models.config import ModelConfig
from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.models.registry import read_fields

LONGROPE = {
    "long_factor": [2.0, 3.0, 7.0, 9.0],
    "long_mscale": 1.4,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0, 1.1, 1.3, 1.4],
    "short_mscale": 1.2,
    "type": "longrope",
}
FIELDS: dict[str, Any] = {
    "architectures": ["PhiMoEForCausalLM"],
    "attention_bias": True,
    "hidden_size": 32,
    "intermediate_size": 48,
    "lm_head_bias": True,
    "max_position_embeddings": 131072,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "original_max_position_embeddings": 4096,
    "rope_scaling": LONGROPE,
    "rope_theta": 10000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "vocab_size": 160,
}
"""Fields in the form of Microsoft's checkpoints."""


def read(**changes: Any) -> ModelConfig:
    return read_fields(Fields({**FIELDS, **changes}))


def test_both_names_of_the_architecture_are_read() -> None:
    config = read()
    assert config == read(architectures=["PhimoeForCausalLM"])
    assert config.experts is not None
    assert (config.experts.count, config.experts.jitter, config.head_bias) == (16, 0.01, True)


@pytest.mark.parametrize(("length", "kind", "factor"), [(4096, "short", 1.2), (4097, "long", 1.4)])
def test_the_served_context_selects_the_factors(length: int, kind: str, factor: float) -> None:
    rope = read().with_context_length(length).rope
    cos, sin = RotaryEmbedding(rope, 8, torch.float32, torch.device("cpu")).angles(torch.tensor([5]))
    angles = 5 / (torch.tensor(LONGROPE[f"{kind}_factor"]) * 10000 ** (torch.arange(4) / 4))
    torch.testing.assert_close(cos[0, 0], angles.cos() * factor)
    torch.testing.assert_close(sin[0, 0], angles.sin() * factor)


def test_the_embedding_may_be_an_ordinary_one() -> None:
    rope = read(rope_scaling=None).rope
    assert (rope.kind, rope.served_attention_factor) == ("default", 1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {**LONGROPE, "long_mscale": None}}, "long_mscale must be a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type must be default or longrope"),
        ({"num_experts_per_tok": 3}, "num_experts_per_tok must be 2"),
        ({"num_local_experts": 1}, r"num_experts_per_tok must be at most num_local_experts \(1\)"),
        ({"router_jitter_noise": 0}, "router_jitter_noise must be a positive number"),
        ({"tie_word_embeddings": True}, "lm_head_bias must be false with tie_word_embeddings"),
    ],
)
def test_invalid_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**changes)
