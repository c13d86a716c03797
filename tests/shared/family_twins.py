# SPDX-License-Identifier: Apache-2.0
"""Tiny random twins of model families: the fields of a real config.json, with its sizes scaled down.

Special fields keep their kinds: periods of sliding windows, layers without RoPE, multipliers, softcaps,
partial rotary embeddings, odd head counts, fused tensors.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 3.0, 7.0],
}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA2 = {
    "num_hidden_layers": 4,
    "sliding_window": 9,
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 2.0,
    "attn_implementation": "eager",
}
GEMMA3 = {"num_hidden_layers": 7, "sliding_window": 9, "query_pre_attn_scalar": 12}
MINISTRAL3 = {**YARN, "type": "yarn", "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.25,
    "head_dim": None,
}
GRANITE4 = {
    **GRANITE,
    "layer_types": ["attention"] * 2,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 48,
    "intermediate_size": 24,
    "mamba_n_heads": 8,
    "position_embedding_type": "rope",
}
GLM4_MOE = {
    "num_hidden_layers": 3,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
    "attention_bias": True,
}
GPT_OSS = {
    "num_hidden_layers": 3,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 9,
    "swiglu_limit": 0.5,
    "rope_parameters": {**YARN, "truncate": False},
    "attn_implementation": "eager",
}
ERNIE_MOE = {
    "num_hidden_layers": 4,
    "moe_num_experts": 7,
    "moe_k": 3,
    "moe_intermediate_size": 16,
    "moe_layer_interval": 2,
    "head_dim": None,
}
PHI_MOE = {
    "num_local_experts": 8,
    "router_jitter_noise": 0.3,
    "attention_bias": True,
    "lm_head_bias": True,
}
PHI_MOE_ROPE = {
    **LONGROPE,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0, 1.1, 1.3, 1.4],
    "long_factor": [1.5, 3.0, 7.0, 9.0],
    "short_mscale": 1.2,
    "long_mscale": 1.4,
}
QWEN_MOE = {
    "num_hidden_layers": 3,
    "num_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
}
QWEN2_MOE = {"shared_expert_intermediate_size": 24, "head_dim": None}
ODD_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}

TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("Apertus", {"head_dim": None, **ODD_HEADS}),
    "cohere": ("Cohere", {"use_qk_norm": True, "head_dim": None, "logit_scale": 4.0}),
    "cohere-tied-plain": ("Cohere", {"head_dim": None, "logit_scale": 4.0, "attention_bias": True}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 4, "sliding_window": 9, "logit_scale": 4.0}),
    "ernie4.5": ("Ernie4_5", {"use_bias": True}),
    "ernie4.5-moe": ("Ernie4_5_Moe", ERNIE_MOE),
    "exaone4": ("Exaone4", {"num_hidden_layers": 5, "sliding_window": 9}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3-scaled": ("Gemma3", {**GEMMA3, "rope_parameters": GEMMA3_ROPES, "final_logit_softcapping": 2.0}),
    "glm": ("Glm", {"rope_parameters": PARTIAL}),
    "glm4": ("Glm4", {"rope_parameters": PARTIAL, **ODD_HEADS}),
    "glm4-moe": ("Glm4Moe", GLM4_MOE),
    "gpt-oss": ("GptOss", GPT_OSS),
    "granite": ("Granite", GRANITE),
    "granite-biases": ("Granite", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    "granite-moe": ("GraniteMoe", {**GRANITE, "num_local_experts": 9, "num_experts_per_tok": 3}),
    "granite4": ("GraniteMoeHybrid", GRANITE4),
    "granite4-nope": ("GraniteMoeHybrid", {**GRANITE4, "position_embedding_type": None, **ODD_HEADS}),
    "hunyuan": ("HunYuanDenseV1", {}),
    "hunyuan-alpha": (
        "HunYuanDenseV1",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}},
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {"num_local_experts": 10, "num_experts_per_tok": 3, "rope_parameters": PARTIAL, **ODD_HEADS},
    ),
    "ministral3": ("Ministral3", {"rope_parameters": MINISTRAL3}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 9}),
    "nemotron": ("Nemotron", {"rope_parameters": PARTIAL, "attention_bias": True}),
    "olmo2": ("Olmo2", ODD_HEADS),
    "olmo3": ("Olmo3", {"num_hidden_layers": 5, "sliding_window": 9, "head_dim": None}),
    "olmoe": ("Olmoe", {"num_experts": 32, "num_experts_per_tok": 8, "attention_bias": True}),
    "phi3": ("Phi3", {"head_dim": None}),
    "phi3-window": ("Phi3", {"head_dim": None, "sliding_window": 9}),
    "phi4-mini-long": (
        "Phi3",
        {"head_dim": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 8},
    ),
    "phi4-mini-short": (
        "Phi3",
        {
            "head_dim": None,
            "rope_parameters": {**LONGROPE, "attention_factor": 1.3},
            "original_max_position_embeddings": 256,
        },
    ),
    "phi3.5-moe": ("Phimoe", {**PHI_MOE, "sliding_window": 9}),
    "phi3.5-moe-long": (
        "Phimoe",
        {**PHI_MOE, "rope_parameters": {**PHI_MOE_ROPE, "original_max_position_embeddings": 8}},
    ),
    "phi3.5-moe-short": (
        "Phimoe",
        {
            "num_local_experts": 3,
            "rope_parameters": {**PHI_MOE_ROPE, "original_max_position_embeddings": 256},
        },
    ),
    "qwen2-moe": ("Qwen2Moe", {**QWEN_MOE, **QWEN2_MOE}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-plain": ("Qwen3Moe", {**QWEN_MOE, "decoder_sparse_step": 2, "attention_bias": True}),
    "seed-oss": ("SeedOss", {"attention_out_bias": True, "mlp_bias": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "head_dim": None}),
    "starcoder2": ("Starcoder2", {"head_dim": None, "sliding_window": 9}),
}
"""Name of a twin: the prefix of Transformers' classes, and the fields that differ from a small Llama's."""
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
}
"""Families without special fields, in the form of `TWINS`; tests of their own cover their language models."""
TWINS_THROUGH_TRANSFORMERS = (
    *("gemma2", "gemma3-scaled", "olmo2", "phi3-window", "granite-biases", "cohere2", "ministral3"),
    *("olmoe", "phi3.5-moe", "qwen2-moe", "qwen3-moe"),
)
"""Twins of native families that tests also run through Transformers."""
PLUS_ONE = ("Gemma", "Gemma2", "Gemma3", "Nemotron")
"""Families whose norms multiply by 1 + weight."""
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
"""Names of configuration classes that do not begin with the prefix alone."""
SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "sdpa",
}
"""Sizes of the twins, which the fields of `TWINS` override."""


GPT: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256, "n_inner": 48}

OTHERS: dict[str, dict[str, Any]] = {
    "Arcee": {},
    "Cwm": {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
    "Gemma": {},
    "GPT2": GPT,
    "GPTBigCode": GPT,
    "GPTNeoX": {},
    "Helium": {},
    "Jais2": {},
    "Ministral": {"sliding_window": 9},
    "NanoChat": {},
    "Olmo": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Persimmon": {},
    "Phi": {},
    "FlexOlmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoeShared": {"num_local_experts": 4, "shared_intermediate_size": 16},
}
"""Architectures without native implementation: the fields that differ from a small Llama's, by the prefix of
Transformers' classes."""
SHARDED_OTHERS = (
    *("Arcee", "Cwm", "Gemma", "GPTNeoX", "Helium", "Jais2", "Ministral", "NanoChat", "Olmo", "Phi"),
)
"""Those of `OTHERS` that can be sharded."""
REFUSED_OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "Bloom": ({}, "does not use the attention interface"),
    "DiffLlama": ({}, "runs a layer several times"),
    "Doge": ({}, "builds the attention mask itself"),
    "Jamba": ({}, "recurrent state"),
    "Lfm2": (
        {"layer_types": ["conv", "full_attention"]},
        "layer_types describes layers with a recurrent state",
    ),
    "Mamba": ({}, "recurrent state"),
    "MiniMax": ({}, "layer_types describes layers with a recurrent state"),
    "StableLm": ({}, "does not use the attention interface"),
}
"""Architectures that cannot be served: such fields, and a part of the error."""


def save_twin(
    folder: Path,
    name: str,
    *,
    head: str = "ForCausalLM",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """Save a seeded random twin to a folder; return the Transformers model, in float32.

    Args:
        folder: Empty folder.
        name: Key of `TWINS` or `PLAIN`.
        head: End of the name of Transformers' class.
        dtype: Data type to which the weights are rounded.
        changes: Fields of config.json that override those of the twin; None leaves a field out.
    """
    prefix, fields = TWINS[name] if name in TWINS else PLAIN[name]
    config_class = getattr(transformers, CONFIGS.get(prefix, f"{prefix}Config"))
    values = {**SMALL, **fields, **changes}
    values = {field: value for field, value in values.items() if value is not None or "window" in field}
    model_class = getattr(transformers, f"{prefix}{head}")
    return save_random_model(folder, model_class, config_class(**values), dtype, plus_one=prefix in PLUS_ONE)


def save_random_model(
    folder: Path, model_class: Any, config: Any, dtype: torch.dtype, *, plus_one: bool
) -> Any:
    """Save a seeded random model, with weights rounded to `dtype`; return it in float32.

    `plus_one` says that norms multiply by 1 + weight.
    """
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    scale = 0.25 * (SMALL["hidden_size"] / config.hidden_size) ** 0.5
    with torch.no_grad():
        for parameter, weights in model.named_parameters():
            if "norm" not in parameter:
                weights.normal_(0.0, scale)
            else:
                ones = parameter.endswith("weight") and not plus_one
                weights.normal_(1.0 if ones else 0.0, 0.25)
        for name, weights in model.named_buffers():
            if name.endswith("correction_bias"):
                weights.normal_(0.0, 0.25)
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            module.limit = config.swiglu_limit  # some versions of Transformers ignore the field
        elif type(module).__name__ == "PhimoeRotaryEmbedding":
            use_factors_of_whole_context(module)
    set_dtype(model, dtype)
    model.save_pretrained(folder)
    return set_dtype(model, torch.float32)


def use_factors_of_whole_context(embedding: Any) -> None:
    """Let the rotary embedding of a Phimoe model use those factors that belong to the longest context.

    Mizzen does this for all prompts, as the code of Microsoft's checkpoints does for long ones. Transformers
    5.23 always uses `short_factor`, and chooses only between `short_mscale` and `long_mscale` by the length.
    """
    embedding.config = deepcopy(embedding.config)
    rope = embedding.config.rope_parameters
    longest = embedding.config.max_position_embeddings
    if longest > rope.get("original_max_position_embeddings", longest):
        rope |= {"short_factor": rope["long_factor"], "short_mscale": rope["long_mscale"]}


def set_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Convert a model's parameters; buffers stay float32, because RoPE needs precise frequencies."""
    for weights in model.parameters():
        weights.data = weights.data.to(dtype)
    model.config.dtype = dtype
    return model


def save_other_twin(folder: Path, prefix: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Save a seeded random twin to a folder; return the Transformers model, in float32.

    Args:
        folder: Empty folder.
        prefix: Prefix of Transformers' classes.
        dtype: Data type to which the weights are rounded.
        changes: Fields of config.json that override those of the twin.
    """
    fields = OTHERS.get(prefix) or REFUSED_OTHERS.get(prefix, ({},))[0]
    config_class = getattr(transformers, f"{prefix}Config")
    name = next(name for name in ("ForCausalLM", "LMHeadModel") if hasattr(transformers, prefix + name))
    config = config_class(**{**SMALL, "attn_implementation": "eager", **fields, **changes})
    model_class = getattr(transformers, prefix + name)
    return save_random_model(folder, model_class, config, dtype, plus_one=prefix in PLUS_ONE)
