# SPDX-License-Identifier: Apache-2.0
"""Description of an encoder by data; the readers of the families fill it in.

Importing this module does not import torch: the supervisor reads configurations too.
"""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.models.block import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Classification head of an encoder: classifier(norm(activation(dense(first token or mean))))."""

    dense: str
    """Name of the first linear layer, without `.weight`."""
    classifier: str = "classifier"
    """Name of the last linear layer."""
    norm: str = ""
    """Name of the norm between the layers (ModernBERT); empty for none."""
    dense_bias: bool = True
    mean: bool = False
    """Whether the head reads the mean of all tokens instead of the first token."""
    activation: Activation | None = None
    """Activation function between the layers; None for tanh (BERT, RoBERTa, GTE)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """Names of an encoder's tensors, without the suffixes `.weight` and `.bias`."""

    prefix: str
    """Prefix of all names except those of the head; checkpoints of models without a head omit it."""
    embedding: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    token_types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    layer: str = "encoder.layer"
    """Name of the list of layers."""
    query_key_value: tuple[str, str, str] = (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
    )
    """Names of the projections; equal names mean one tensor that holds all three."""
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    inner: tuple[str, ...] = ("intermediate.dense",)
    """Name of the first projection of the feed-forward block, or names of the projections with a gate, in the
    order in which a tensor that holds both stores them."""
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    final_norm: str = ""
    """Norm after the last layer; an empty name means that the layers end without a norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Structure of an encoder beyond the sizes in `ModelConfig`.

    Norms are LayerNorms. They follow attention and feed-forward block (as in BERT), or precede them with
    `norm_first` (as in ModernBERT, whose first layer has no norm before its attention).
    """

    names: EncoderNames
    positions: int = 0
    """Number of learned position embeddings; 0 with rotary embeddings."""
    first_position: int = 0
    """Position of a prompt's first token (RoBERTa begins after the id of its padding token)."""
    padding_token: int | None = None
    """Token that has the position `first_position` - 1 and is not counted in later positions (RoBERTa)."""
    token_types: int = 0
    """Number of token type embeddings; 0 for none."""
    norm_first: bool = False
    norm_bias: bool = True
    inner_bias: bool = True
    """Whether the inner projections of the feed-forward blocks have biases."""
    up_first: bool = False
    """Whether the first of two inner projections is the one without the activation function."""
    head: HeadConfig | None = None
    """Classification head; None for an embedding model."""

    @property
    def has_gate(self) -> bool:
        """Whether the feed-forward block has a gate: down(activation(gate(x)) * up(x))."""
        return len(self.names.inner) == 2
