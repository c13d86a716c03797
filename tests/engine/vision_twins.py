# SPDX-License-Identifier: Apache-2.0
"""Tiny random twins of models for images, whose text parts are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from family_twins import SMALL, YARN, set_dtype

SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
CLIP = {**SIGLIP, "model_type": "clip_vision_model"}
PIXTRAL = {**SIGLIP, "model_type": "pixtral", "head_dim": 8}
QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
MINISTRAL3 = {**YARN, "llama_4_scaling_beta": 0.1}

VISION_TWINS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "cohere2-vision": (
        "Cohere2Vision",
        {"model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 9, "logit_scale": 4.0},
        SIGLIP,
        {"alignment_intermediate_size": 16},
    ),
    "gemma3": (
        "Gemma3",
        {"num_hidden_layers": 7, "sliding_window": 9, "query_pre_attn_scalar": 12},
        SIGLIP,
        {"mm_tokens_per_image": 4},
    ),
    "llava-clip": ("Llava", {"model_type": "llama"}, CLIP, {}),
    "llava-siglip": (
        "Llava",
        {"model_type": "qwen2"},
        SIGLIP,
        {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    ),
    "llava-next": ("LlavaNext", {"model_type": "mistral", "sliding_window": None}, CLIP, {}),
    "pixtral": (
        "Llava",
        {"model_type": "mistral", "sliding_window": None},
        PIXTRAL,
        {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    ),
    "mistral3": ("Mistral3", {"model_type": "mistral", "sliding_window": None}, PIXTRAL, {}),
    "ministral3": (
        "Mistral3",
        {"model_type": "ministral3", "rope_parameters": MINISTRAL3},
        PIXTRAL,
        {"tie_word_embeddings": False},
    ),
    "qwen2-vl": ("Qwen2VL", {"rope_parameters": MROPE}, {**QWEN, "embed_dim": 16, "hidden_size": 32}, {}),
    "qwen2.5-vl": ("Qwen2_5_VL", {"rope_parameters": MROPE}, {**QWEN, "fullatt_block_indexes": [0]}, {}),
    "qwen3-vl": (
        "Qwen3VL",
        {"rope_parameters": {**MROPE, "mrope_section": [2, 1, 1]}, "num_hidden_layers": 3},
        {**QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        {"tie_word_embeddings": True},
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        {
            "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1]},
            "num_hidden_layers": 3,
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
        },
        {**QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        {"tie_word_embeddings": False},
    ),
}
"""Name of a twin: the prefix of Transformers' classes, the fields of the text part that differ from a small
Llama's, those of the tower for images, and those of the whole model."""


QWEN_TOWER = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_heads": 3,
    "patch_size": 4,
    "out_hidden_size": 32,
}
CLIP_TOWER = {
    "model_type": "clip_vision_model",
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "image_size": 24,
    "patch_size": 8,
}
SIGLIP_TOWER = {**CLIP_TOWER, "model_type": "siglip_vision_model"}
PIXTRAL_TOWER = {**CLIP_TOWER, "model_type": "pixtral", "patch_size": 4, "image_size": 64}
TOWERS: dict[str, dict[str, Any]] = {
    "llava-clip": CLIP_TOWER,
    "llava-siglip": SIGLIP_TOWER,
    "llava-next": CLIP_TOWER,
    "pixtral": PIXTRAL_TOWER,
    "mistral3": PIXTRAL_TOWER,
    "qwen2-vl": {**QWEN_TOWER, "embed_dim": 48, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2.5-vl": {**QWEN_TOWER, "window_size": 24, "fullatt_block_indexes": [1, 3]},
    "qwen3-vl": {
        **QWEN_TOWER,
        "deepstack_visual_indexes": [0, 2],
        "num_position_embeddings": 49,
    },
    "qwen3-vl-moe": {
        **QWEN_TOWER,
        "deepstack_visual_indexes": [2, 1],
        "num_position_embeddings": 16,
    },
}
"""Towers with several layers, by the name of the twin."""


def save_vision_twin(
    folder: Path,
    name: str,
    tower: dict[str, Any] | None = None,
    *,
    text: dict[str, Any] | None = None,
    scale: float = 0.25,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """Save a seeded random twin to a folder; return the Transformers model, in float32.

    Args:
        folder: Folder of the twin.
        name: Name of the twin.
        tower: Fields of the tower; by default those of `VISION_TWINS`.
        text: Fields of the text part that differ.
        scale: Standard deviation of the weights; that of norms is 0.25.
        dtype: Data type to which the weights are rounded.
        changes: Fields of the whole model that differ.
    """
    prefix, usual_text, usual_tower, whole = VISION_TWINS[name]
    config = getattr(transformers, f"{prefix}Config")(
        text_config={**SMALL, **usual_text, **(text or {})},
        vision_config=tower or usual_tower,
        **{**whole, **changes},
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for parameter, weights in model.named_parameters():
            plus_one = prefix == "Gemma3"
            is_norm = "norm" in parameter
            weights.normal_(1.0 if is_norm and not plus_one else 0.0, 0.25 if is_norm else scale)
    set_dtype(model, dtype).save_pretrained(folder)
    return set_dtype(model, torch.float32)
