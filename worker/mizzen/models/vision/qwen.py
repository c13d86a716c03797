# SPDX-License-Identifier: Apache-2.0
"""Configurations of the towers of Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (arXiv 2502.13923) and Qwen3-VL.

Importing this module does not import torch.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

from mizzen.models.block import Activation, NormKind
from mizzen.models.config import read_layer_count
from mizzen.models.hf_fields import Fields
from mizzen.models.vision.config import ProjectorConfig, TowerTensors, VisionConfig, VisionNames
from mizzen.models.vision.fields import (
    CLIP_NORMALISATION,
    read_heads,
    read_layer_indices,
    read_rope_theta,
    read_size,
    read_vision_activation,
    tower_fields,
)

QWEN_TOWER = TowerTensors(prefixes=(("model.visual.", "visual."), ("visual.", "visual.")))
QWEN2 = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "mlp_ratio": 4,
    "num_heads": 16,
    "patch_size": 14,
}
QWEN2_5 = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
QWEN3 = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
EPSILON = 1e-6


def read_qwen2(fields: Fields) -> VisionConfig:
    """Read the tower of Qwen2-VL."""
    tower = tower_fields(fields, QWEN2)
    layers, hidden = read_layer_count(tower, "depth"), tower.integer("embed_dim")
    return VisionConfig(
        model_type="qwen2_vl",
        intermediate_size=int(hidden * tower.number("mlp_ratio")),
        activation=read_vision_activation(tower, "hidden_act", "quick_gelu"),
        projectors=(make_merger(tower, layers, hidden, NormKind.LAYER),),
        output_size=tower.integer("hidden_size"),
        **read_common(tower, layers, hidden, "embed_dim"),
    )


def read_qwen2_5(fields: Fields) -> VisionConfig:
    """Read the tower of Qwen2.5-VL, most of whose layers attend within windows."""
    tower = tower_fields(fields, QWEN2_5)
    layers, hidden = read_layer_count(tower, "depth"), tower.integer("hidden_size")
    common = read_common(tower, layers, hidden, "hidden_size")
    window = tower.integer("window_size") // (common["merge"] * common["patch_size"])
    if not window:
        raise tower.error("window_size", "must be at least spatial_merge_size * patch_size")
    return VisionConfig(
        model_type="qwen2_5_vl",
        names=VisionNames(inner=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj"),
        norm=NormKind.RMS,
        intermediate_size=tower.integer("intermediate_size"),
        activation=read_vision_activation(tower, "hidden_act", "silu"),
        window=window,
        full_layers=read_layer_indices(tower, "fullatt_block_indexes", layers),
        projectors=(make_merger(tower, layers, hidden, NormKind.RMS),),
        output_size=tower.integer("out_hidden_size"),
        **common,
    )


def read_qwen3(fields: Fields) -> VisionConfig:
    """Read the tower of Qwen3-VL, with features for the decoder's first layers."""
    tower = tower_fields(fields, QWEN3)
    layers, hidden = read_layer_count(tower, "depth"), tower.integer("hidden_size")
    common = read_common(tower, layers, hidden, "hidden_size")
    inner = hidden * common["merge"] ** 2
    positions = tower.integer("num_position_embeddings")
    if isqrt(positions) ** 2 != positions:
        raise tower.error("num_position_embeddings", "must be a square number")
    stages = read_layer_indices(tower, "deepstack_visual_indexes", layers)

    def merger(name: str, features: int, *, after_merge: bool) -> ProjectorConfig:
        return ProjectorConfig(
            features=(features,),
            first=f"visual.{name}.linear_fc1",
            second=f"visual.{name}.linear_fc2",
            inner_size=inner,
            norm=f"visual.{name}.norm",
            norm_epsilon=EPSILON,
            norm_after_merge=after_merge,
        )

    # Transformers lists the features in the order of the layers.
    deepstack = [
        merger(f"deepstack_merger_list.{stages.index(layer)}", layer + 1, after_merge=True)
        for layer in sorted(stages)
    ]
    return VisionConfig(
        model_type="qwen3_vl",
        names=VisionNames(inner=("mlp.linear_fc1",), down="mlp.linear_fc2"),
        intermediate_size=tower.integer("intermediate_size"),
        activation=read_vision_activation(tower, "hidden_act", "gelu_pytorch_tanh"),
        patch_bias=True,
        positions=positions,
        projectors=(merger("merger", layers, after_merge=False), *deepstack),
        output_size=tower.integer("out_hidden_size"),
        **common,
    )


def read_common(tower: Fields, layers: int, hidden: int, hidden_name: str) -> dict[str, Any]:
    """Read the fields that all towers of Qwen share."""
    return {
        "tensors": QWEN_TOWER,
        "normalisation": CLIP_NORMALISATION,
        "layers": layers,
        "hidden_size": hidden,
        "heads": read_heads(tower, "num_heads", hidden, hidden_name),
        "norm_epsilon": EPSILON,
        "patch_size": read_size(tower, "patch_size"),
        "frames": read_size(tower, "temporal_patch_size", 2),
        "merge": tower.integer("spatial_merge_size", 2),
        "rope_theta": read_rope_theta(tower),
    }


def make_merger(tower: Fields, layers: int, hidden: int, norm: NormKind) -> ProjectorConfig:
    """Describe the projector of Qwen2-VL and Qwen2.5-VL."""
    return ProjectorConfig(
        features=(layers,),
        first="visual.merger.mlp.0",
        second="visual.merger.mlp.2",
        inner_size=hidden * tower.integer("spatial_merge_size", 2) ** 2,
        activation=Activation.GELU,
        norm="visual.merger.ln_q",
        norm_kind=norm,
        norm_epsilon=EPSILON,
    )
