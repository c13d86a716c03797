# SPDX-License-Identifier: Apache-2.0
"""Lists the features in which a model differs from a Llama, for documentation and `mizzen inspect`."""

from __future__ import annotations

from mizzen.models.block import Activation, NormKind, NormPlacement, QKNorm
from mizzen.models.config import ModelConfig
from mizzen.models.encoders.description import EncoderConfig
from mizzen.models.experts_config import Scoring

NORMS = {
    NormKind.RMS_PLUS_ONE: "RMSNorm with 1 + weight",
    NormKind.LAYER: "LayerNorm",
    NormKind.LAYER_PLUS_ONE: "LayerNorm with 1 + weight",
}
PLACEMENTS = {
    NormPlacement.POST: "norms after the blocks",
    NormPlacement.SANDWICH: "norms around the blocks",
    NormPlacement.PARALLEL: "parallel blocks",
}
QK_NORMS = {
    QKNorm.HEAD: "QK norm",
    QKNorm.HEADWISE: "QK norm with weights of each head",
    QKNorm.FULL: "QK norm over all heads",
}
ACTIVATIONS = {
    Activation.GELU: "GELU",
    Activation.GELU_TANH: "GELU (tanh)",
    Activation.RELU2: "squared ReLU",
    Activation.XIELU: "xIELU",
    Activation.CLAMPED_SWIGLU: "clamped SwiGLU",
}


def list_features(config: ModelConfig) -> tuple[str, ...]:
    """Return the features of a model that a Llama does not have."""
    if config.encoder is not None:
        return list_encoder_features(config, config.encoder)
    block = config.block
    found = [
        NORMS.get(block.norm, ""),
        PLACEMENTS.get(block.placement, ""),
        QK_NORMS[block.qk_norm] if block.qk_norm else "",
        "QKV biases" if config.qkv_bias else "",
        ACTIVATIONS.get(block.activation, ""),
        "" if block.has_gate else "no gate",
        _describe_windows(config),
        _describe_ropes(config),
        "softcaps" if block.attention_softcap or config.logits_softcap else "",
        _describe_multipliers(config),
        _describe_experts(config),
        "attention sinks" if block.attention_sinks else "",
        "scaled queries" if block.query_scaling else "",
    ]
    return tuple(feature for feature in found if feature)


def list_encoder_features(config: ModelConfig, encoder: EncoderConfig) -> tuple[str, ...]:
    """Return the features of an encoder, by which the families differ."""
    found = [
        "bidirectional attention",
        "learned positions" if encoder.positions else "RoPE",
        "token types" if encoder.token_types > 1 else "",
        "windows in some layers" if any(config.windows) else "",
        "norms before the blocks" if encoder.norm_first else "",
        "gate" if encoder.has_gate else "",
    ]
    return tuple(feature for feature in found if feature)


def _describe_experts(config: ModelConfig) -> str:
    if config.experts is None:
        return ""
    if config.experts.scoring is Scoring.SPARSEMIXER:
        return "experts weighted by SparseMixer"
    return "experts, and one that all tokens share" if config.experts.shared_width else "experts"


def _describe_windows(config: ModelConfig) -> str:
    if all(window is None for window in config.windows):
        return ""
    return "sliding windows" if None not in config.windows else "sliding windows in some layers"


def _describe_ropes(config: ModelConfig) -> str:
    ropes = config.ropes
    found = [
        "partial RoPE" if any(rope.rotary_dim for rope in ropes) else "",
        "interleaved RoPE" if any(rope.interleaved for rope in ropes) else "",
        "layers without RoPE" if any(rope.kind == "none" for rope in ropes) else "",
        "RoPE by kind of layer" if len([rope for rope in ropes if rope.kind != "none"]) > 1 else "",
    ]
    return ", ".join(feature for feature in found if feature)


def _describe_multipliers(config: ModelConfig) -> str:
    factors = (config.embedding_multiplier, config.logits_multiplier, config.block.residual_multiplier)
    return "multipliers" if any(factor != 1 for factor in factors) else ""
