# SPDX-License-Identifier: Apache-2.0
"""Description of a decoder layer by data: its norms, attention, feed-forward block and tensor names.

A family's config reader fills in a `BlockConfig`, and `mizzen.models.decoder_layer` builds layers from it.
Importing this module does not import torch: the supervisor reads configurations too.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class NormKind(enum.StrEnum):
    """Kind of normalisation."""

    RMS = "rms"
    """RMSNorm (arXiv 1910.07467), multiplied by the weight."""
    RMS_PLUS_ONE = "rms_plus_one"
    """RMSNorm, multiplied by 1 + weight in float32 (Gemma)."""
    LAYER = "layer"
    """LayerNorm (arXiv 1607.06450), multiplied by the weight; the bias is optional."""
    LAYER_PLUS_ONE = "layer_plus_one"
    """LayerNorm, multiplied by 1 + weight (Nemotron); the bias is optional."""


class NormPlacement(enum.StrEnum):
    """Places of the norms in a decoder layer; h is the residual stream."""

    PRE = "pre"
    """h += attention(norm(h)); h += mlp(norm(h))."""
    POST = "post"
    """h += norm(attention(h)); h += norm(mlp(h)) (OLMo 2, EXAONE 4)."""
    SANDWICH = "sandwich"
    """h += norm(attention(norm(h))); h += norm(mlp(norm(h))), with four norms (Gemma 2, GLM-4)."""
    PARALLEL = "parallel"
    """n = norm(h); h += attention(n) + mlp(n) (Cohere)."""


class QKNorm(enum.StrEnum):
    """Scope of the norm of queries and keys."""

    HEAD = "head"
    """Each head is normalised by itself, with one weight for all heads."""
    HEADWISE = "headwise"
    """Each head is normalised by itself, and each head has its own weights (Cohere)."""
    FULL = "full"
    """All heads of a token are normalised together (OLMo 2)."""


class Activation(enum.StrEnum):
    """Activation function of a feed-forward block."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    """GELU in its tanh approximation (arXiv 1606.08415)."""
    QUICK_GELU = "quick_gelu"
    """GELU in its sigmoid approximation, x * sigmoid(1.702 * x) (arXiv 1606.08415)."""
    RELU2 = "relu2"
    """The square of ReLU (arXiv 2109.08668)."""
    XIELU = "xielu"
    """xIELU (arXiv 2411.13010), whose two parameters are learned for each layer."""
    CLAMPED_SWIGLU = "clamped_swiglu"
    """The gate of gpt-oss: g * sigmoid(gate_slope * g) * (u + 1), with g clamped to at most `gate_limit`, and
    u to plus or minus `gate_limit`; g and u are the gate and up projections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of a checkpoint's tensors, without the suffixes `.weight` and `.bias`."""

    prefix: str = "model."
    """Prefix of all names except that of the head."""
    head: str = "lm_head"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    attention: str = "self_attn"
    query_key_value: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    """Names of the query, key and value projections; equal names mean one tensor that holds all three."""
    output: str = "o_proj"
    query_key_norm: tuple[str, str] = ("q_norm", "k_norm")
    sinks: str = "sinks"
    """Scores of the attention sinks; the name has no suffix in checkpoints."""
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Names of the gate and up projections; equal names mean one tensor that holds both. A block without a
    gate has a single name."""
    down: str = "down_proj"
    attention_norm: str = "input_layernorm"
    """Norm before the attention."""
    mlp_norm: str = "post_attention_layernorm"
    """Norm before the feed-forward block."""
    after_attention_norm: str = "post_attention_layernorm"
    """Norm of the attention's output, in the placements `POST` and `SANDWICH`."""
    after_mlp_norm: str = "post_feedforward_layernorm"
    """Norm of the feed-forward block's output, in the placements `POST` and `SANDWICH`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """A decoder layer, described by data."""

    norm: NormKind = NormKind.RMS
    norm_bias: bool = False
    placement: NormPlacement = NormPlacement.PRE
    qk_norm: QKNorm | None = None
    qk_norm_kind: NormKind = NormKind.RMS
    qk_norm_after_rope: bool = False
    """Whether queries and keys are normalised after RoPE instead of before."""
    attention_scale: float | None = None
    """Factor of the query-key products; None for 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Bound c of the scores, which become c * tanh(score / c) (Gemma 2); None for none."""
    attention_sinks: bool = False
    """Whether each query head has a learned attention sink (gpt-oss)."""
    query_scaling: tuple[float, int] | None = None
    """Pair (b, n) of Llama 4: a query at position p is multiplied by 1 + b * log(1 + floor(p / n))."""
    activation: Activation = Activation.SILU
    gate_limit: float = 7.0
    """Limit of `CLAMPED_SWIGLU`."""
    gate_slope: float = 1.702
    """Factor of g within the sigmoid of `CLAMPED_SWIGLU`."""
    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and feed-forward block before they are added (Granite)."""
    names: TensorNames = field(default_factory=TensorNames)

    @property
    def has_gate(self) -> bool:
        """Whether the feed-forward block has a gate: down(activation(gate(x)) * up(x))."""
        return len(self.names.gate_up) == 2

    @property
    def has_swiglu(self) -> bool:
        """Whether the feed-forward block is SwiGLU: with a gate, and SiLU as its activation."""
        return self.has_gate and self.activation is Activation.SILU
