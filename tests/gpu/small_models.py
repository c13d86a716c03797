# SPDX-License-Identifier: Apache-2.0
"""Seeded random models that are small enough for token-by-token comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
VOCABULARY = 512


def make_model(family: str) -> Any:
    """Return a seeded random Transformers model, in float32 on the CPU, with clear greedy choices."""
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        eos_token_id=2,
        **({"sliding_window": None} if family == "mistral" else {}),
    )
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.normal_(1.0 if "norm" in name else 0.0, 0.15)
    return model


def save_model(folder: Path, family: str) -> Any:
    """Save a seeded random model; return the Transformers model on the GPU."""
    model = make_model(family)
    model.save_pretrained(folder)
    return model.cuda()
