# SPDX-License-Identifier: Apache-2.0
"""The count of the parameters of a mixture of experts is that of the model in Transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from mizzen.models.expert_parameters import MIXTURES
from mizzen.models.hf_fields import Fields
from mizzen.models.registry import read_model

SIZES = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Glm4MoeForCausalLM": (
        "Glm4Moe",
        {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 2, "use_qk_norm": True},
    ),
    "MixtralForCausalLM": ("Mixtral", {}),
    "OlmoeForCausalLM": ("Olmoe", {"head_dim": 4}),
    "Qwen2MoeForCausalLM": ("Qwen2Moe", {"shared_expert_intermediate_size": 20, "head_dim": 4}),
    "Qwen3MoeForCausalLM": ("Qwen3Moe", {"tie_word_embeddings": True, "attention_bias": True}),
}


def count(config: dict[str, Any], architecture: str) -> int:
    return read_model(Fields({**config, "architectures": [architecture]})).transformers_parameters


@pytest.mark.parametrize("sparse", [{}, {"decoder_sparse_step": 2, "mlp_only_layers": [1]}])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_the_count_is_that_of_transformers(architecture: str, sparse: dict[str, Any]) -> None:
    name, changes = CASES[architecture]
    hf_config = getattr(transformers, f"{name}Config")(**SIZES | changes | sparse)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(hf_config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    biases = (name for name in model.state_dict() if name.endswith("e_score_correction_bias"))
    expected += sum(model.state_dict()[name].numel() for name in biases)  # buffers that checkpoints contain
    assert count(json.loads(hf_config.to_json_string(use_diff=False)), architecture) == expected


def test_an_absent_or_invalid_size_leaves_the_count_unknown() -> None:
    config = {**SIZES, "mlp_only_layers": 1}
    assert count(config, "Qwen3MoeForCausalLM") == 0
    assert count({**SIZES, "moe_intermediate_size": None}, "Qwen3MoeForCausalLM") == 0
    assert count(SIZES, "GraniteMoeForCausalLM") == 0
