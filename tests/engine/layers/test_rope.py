# SPDX-License-Identifier: Apache-2.0
"""RoPE scaling `yarn` and `dynamic`: frequencies equal those of Transformers, and contexts are extended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mizzen.layers.rope import inverse_frequencies
from mizzen.models.families.qwen3 import parse_config
from mizzen.models.hf_fields import ConfigError, Fields

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attention_factor": 1.0},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"truncate": False},
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"factor": 1.0},
    ],
    ids=str,
)
def test_yarn_frequencies_equal_transformers(more: dict[str, Any]) -> None:
    rope = parse_config(Fields({**SHAPE, "rope_scaling": {**YARN, **more}})).rope
    config = Qwen3Config(**SHAPE, head_dim=128, rope_parameters={**YARN, **more, "rope_theta": 1e6})
    inverse, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(rope, 128), inverse, rtol=1e-5, atol=0)
    assert rope.attention_factor == pytest.approx(scale)


def test_yarn_extends_the_context_length() -> None:
    def context(**rope: Any) -> int:
        return parse_config(Fields({**SHAPE, "rope_scaling": {"rope_type": "yarn", **rope}})).context_length

    assert context(factor=4.0, original_max_position_embeddings=32768) == 131072
    assert context(factor=1.1, original_max_position_embeddings=32768) == 40960
    assert context(factor=4.0) == 40960


def test_the_original_context_may_be_a_top_level_field() -> None:
    shape = {**SHAPE, "original_max_position_embeddings": 20000}
    scaling = {"rope_type": "yarn", "factor": 4.0}
    config = parse_config(Fields({**shape, "rope_scaling": scaling}))
    transformers_config = Qwen3Config(**shape, head_dim=128, rope_parameters={**scaling, "rope_theta": 1e6})
    inverse, _ = ROPE_INIT_FUNCTIONS["yarn"](transformers_config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(config.rope, 128), inverse, rtol=1e-5, atol=0)
    assert config.context_length == 80000


@pytest.mark.parametrize("length", [100, 4096, 4097, 6000, 8192])
def test_dynamic_rope_equals_transformers_at_the_served_context(length: int) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    shape = {**SHAPE, "max_position_embeddings": 4096}
    config = parse_config(Fields({**shape, "rope_scaling": scaling}))
    transformers_config = Qwen3Config(**shape, head_dim=128, rope_parameters={**scaling, "rope_theta": 1e6})
    inverse, scale = ROPE_INIT_FUNCTIONS["dynamic"](transformers_config, torch.device("cpu"), seq_len=length)
    rope = config.with_context_length(length).rope
    torch.testing.assert_close(inverse_frequencies(rope, 128), inverse, rtol=1e-5, atol=0)
    assert (rope.attention_factor, scale) == (1.0, 1.0)
    assert config.context_length == config.rope.served_context == 8192


def test_logits_with_dynamic_rope_equal_transformers(kit: SimpleNamespace, tmp_path: Path) -> None:
    """The prompt is as long as the served context, so both implementations scale to the same length."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    transformers_model = kit.save_model(
        tmp_path, "llama", max_position_embeddings=64, rope_parameters=scaling
    )
    bench, prompt = kit.Bench(tmp_path), kit.tokens(128)
    logits = bench.logits(bench.plan([], [(0, 0, prompt, True)], (kit.greedy(0),)))
    torch.testing.assert_close(logits, kit.oracle(transformers_model, prompt), atol=1e-4, rtol=1e-4)
    assert bench.model.config.context_length == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": -1}, "factor must be a positive number, not -1"),
        ({"beta_slow": 40.0}, r"beta_slow must be below beta_fast \(32.0\), not 40.0"),
        ({"truncate": "no"}, "truncate must be true or false"),
    ],
)
def test_invalid_rope_parameters_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(Fields({**SHAPE, "rope_scaling": {**YARN, **changes}}))
