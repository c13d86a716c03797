# SPDX-License-Identifier: Apache-2.0
"""Configurations of LLaVA (arXiv 2310.03744), LLaVA-NeXT, Pixtral (arXiv 2410.07073) and Mistral 3.

Their towers are those of CLIP (arXiv 2103.00020), SigLIP (arXiv 2303.15343) or Pixtral. Importing this module
does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mizzen.models.block import NormKind
from mizzen.models.config import read_layer_count
from mizzen.models.hf_fields import Fields
from mizzen.models.vision.config import (
    Normalisation,
    ProjectorConfig,
    TowerTensors,
    VisionConfig,
    VisionNames,
)
from mizzen.models.vision.fields import (
    CLIP_NORMALISATION,
    read_features,
    read_heads,
    read_rope_theta,
    read_size,
    read_vision_activation,
    tower_fields,
)

TOWER, PROJECTOR, NEWLINE = "vision_tower.", "multi_modal_projector.", "image_newline"
LLAVA_TOWER = TowerTensors(
    prefixes=tuple(
        (whole + stored, own)
        for whole in ("model.", "")
        for stored, own in (
            (TOWER + "vision_model.", TOWER),
            (TOWER, TOWER),
            (PROJECTOR, PROJECTOR),
            (NEWLINE, NEWLINE),
        )
    )
)
CLIP, SIGLIP, PIXTRAL = "clip_vision_model", "siglip_vision_model", "pixtral"
LLAVA_DEFAULTS = {
    "model_type": CLIP,
    "intermediate_size": 4096,
    "hidden_size": 1024,
    "patch_size": 14,
    "image_size": 336,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
"""Tower of a LLaVA whose config.json describes none."""
MISTRAL3_DEFAULTS = {**LLAVA_DEFAULTS, "model_type": PIXTRAL, "image_size": 1540}
"""Tower of a Mistral 3 whose config.json describes none."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    CLIP: {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 32,
    },
    SIGLIP: {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
    },
    PIXTRAL: {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 16,
    },
}
"""Fields that a described tower may leave out, by its `model_type`."""
CLIP_NAMES = VisionNames(
    prefix=TOWER,
    patch_embedding="embeddings.patch_embedding",
    positions="embeddings.position_embedding",
    layer="encoder.layers",
    attention_norm="layer_norm1",
    mlp_norm="layer_norm2",
    query_key_value=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.out_proj",
)
PIXTRAL_NAMES = VisionNames(
    prefix=TOWER,
    patch_embedding="patch_conv",
    first_norm="ln_pre",
    layer="transformer.layers",
    attention_norm="attention_norm",
    mlp_norm="ffn_norm",
    query_key_value=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    output="attention.o_proj",
    inner=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
UNUSED = (r"^vision_tower\.post_layernorm\.", r"^vision_tower\.head\.", r"\.position_ids$")
"""Tensors of CLIP and SigLIP that are not needed: their pooled output, and indices of positions."""


def read_llava(fields: Fields) -> VisionConfig | None:
    """Read the tower and the projector of LLaVA, or of Pixtral; None if the tower is not served."""
    tower = read_tower(fields, LLAVA_DEFAULTS)
    return None if tower is None else with_projector(fields, tower)


def read_llava_next(fields: Fields) -> VisionConfig | None:
    """Read the tower and the projector of LLaVA-NeXT; None if the tower is not served."""
    tower = read_tower(fields, LLAVA_DEFAULTS)
    if tower is None or not tower.image_size:
        return None
    return replace(with_projector(fields, tower), newline=NEWLINE)


def read_mistral3(fields: Fields) -> VisionConfig | None:
    """Read the tower and the projector of Mistral 3, which merges patches; None if the tower is not served.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    tower = read_tower(fields, MISTRAL3_DEFAULTS)
    if tower is None or tower.model_type != PIXTRAL:
        return None
    config = with_projector(fields, tower, feature=-1, bias=False)
    projector = config.projectors[0]
    if len(projector.features) != 1:
        raise fields.error("vision_feature_layer", "must be a single layer")
    text = fields.child("text_config")
    return replace(
        config,
        merge=fields.integer("spatial_merge_size", 2),
        projectors=(
            replace(
                projector,
                norm=PROJECTOR + "norm",
                norm_kind=NormKind.RMS,
                norm_epsilon=text.number("rms_norm_eps", 1e-5),
                merging=PROJECTOR + "patch_merger.merging_layer",
            ),
        ),
    )


def read_tower(fields: Fields, whole: Mapping[str, Any]) -> VisionConfig | None:
    """Read a tower, without projectors; None if its type is not served.

    `whole` describes the tower of a model whose config.json describes none.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    described = fields.child("vision_config").values
    kind = described.get("model_type", whole["model_type"])
    if not isinstance(kind, str) or kind not in DEFAULTS:
        return None
    tower = tower_fields(fields, DEFAULTS[kind] if "model_type" in described else whole)
    hidden, layers = tower.integer("hidden_size"), read_layer_count(tower, "num_hidden_layers")
    common: dict[str, Any] = {
        "model_type": kind,
        "tensors": LLAVA_TOWER,
        "ignored_tensors": UNUSED,
        "layers": layers,
        "hidden_size": hidden,
        "intermediate_size": tower.integer("intermediate_size"),
        "heads": read_heads(tower, "num_attention_heads", hidden, "hidden_size"),
        "patch_size": read_size(tower, "patch_size"),
        "projectors": (),
        "output_size": 0,
    }
    if kind == PIXTRAL:
        return VisionConfig(
            names=PIXTRAL_NAMES,
            normalisation=CLIP_NORMALISATION,
            norm=NormKind.RMS,
            norm_epsilon=1e-5,
            activation=read_vision_activation(tower, "hidden_act", "gelu"),
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            rope_theta=read_rope_theta(tower),
            rope_alternates=True,
            **common,
        )
    size = read_size(tower, "image_size")
    if size < common["patch_size"]:
        raise tower.error("image_size", f"must be at least patch_size ({common['patch_size']})")
    has_class = kind == CLIP
    return VisionConfig(
        names=replace(CLIP_NAMES, first_norm="pre_layrnorm" if has_class else ""),
        normalisation=CLIP_NORMALISATION if has_class else Normalisation(),
        norm_epsilon=tower.number("layer_norm_eps", 1e-5 if has_class else 1e-6),
        activation=read_vision_activation(
            tower, "hidden_act", "quick_gelu" if has_class else "gelu_pytorch_tanh"
        ),
        patch_bias=not has_class,
        image_size=size,
        positions=(size // common["patch_size"]) ** 2,
        class_token=has_class,
        **common,
    )


def with_projector(
    fields: Fields, tower: VisionConfig, *, feature: int = -2, bias: bool = True
) -> VisionConfig:
    """Return the configuration of a tower with the projector that the whole model describes.

    Layers of the tower that the projector does not need are left out.

    Args:
        fields: Fields of config.json.
        tower: Configuration of the tower with all its layers.
        feature: Default of `vision_feature_layer`.
        bias: Default of `multimodal_projector_bias`.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    features = read_features(fields, "vision_feature_layer", tower.layers, feature)
    strategy = fields.values.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise fields.error("vision_feature_select_strategy", "must be default or full")
    drops_first = strategy == "default" and tower.model_type != PIXTRAL
    layers = max(1, *features)
    text = fields.child("text_config")
    output_size = text.integer("hidden_size", fields.integer("hidden_size", 4096))
    prefix = re.escape(tower.names.prefix + tower.names.layer)
    skipped = [rf"^{prefix}\.{layer}\." for layer in range(layers, tower.layers)]
    projector = ProjectorConfig(
        features=features,
        first=PROJECTOR + "linear_1",
        second=PROJECTOR + "linear_2",
        inner_size=output_size,
        bias=fields.flag("multimodal_projector_bias", bias),
        activation=read_vision_activation(fields, "projector_hidden_act", "gelu"),
    )
    return replace(
        tower,
        layers=layers,
        ignored_tensors=(*tower.ignored_tensors, *skipped),
        drops_first=drops_first,
        projectors=(projector,),
        output_size=output_size,
    )
