# SPDX-License-Identifier: Apache-2.0
"""Reads the configuration of encoders; what the families have in common.

Importing this module does not import torch: the supervisor reads configurations too.
"""

from __future__ import annotations

from typing import Any

from mizzen.common.model_task import Task
from mizzen.core.request import Pooling
from mizzen.models.block import Activation, BlockConfig, TensorNames
from mizzen.models.config import ACTIVATIONS, ModelConfig, read_activation, read_dtype, read_token_ids
from mizzen.models.encoders.description import EncoderConfig
from mizzen.models.hf_fields import Fields
from mizzen.models.pooling.labels import read_labels, read_score_activation
from mizzen.models.rope_config import RopeConfig
from mizzen.quantization.reader import read_quantization

CLASSIFICATION = "ForSequenceClassification"
"""End of the names of architectures with a classification head."""


def encoder_config(
    fields: Fields,
    architecture: str,
    encoder: EncoderConfig,
    *,
    hidden: int,
    heads: int,
    layers: int,
    intermediate: int,
    prompt_tokens: int,
    norm_epsilon: float,
    activation: Activation,
    qkv_bias: bool = True,
    output_bias: bool = True,
    mlp_bias: bool = True,
    ropes: tuple[RopeConfig, ...] = (),
    rope_by_layer: tuple[int, ...] = (),
    windows: tuple[int | None, ...] = (),
    ignored: tuple[str, ...] = (),
) -> ModelConfig:
    """Return the configuration of an encoder.

    Args:
        fields: Fields of config.json.
        architecture: Name of the architecture.
        encoder: Structure of the encoder.
        hidden: Hidden size.
        heads: Number of attention heads.
        layers: Number of layers.
        intermediate: Inner size of the feed-forward blocks.
        prompt_tokens: Maximum number of tokens of a prompt.
        norm_epsilon: Epsilon of the norms.
        activation: Activation function of the feed-forward blocks.
        qkv_bias: Whether query, key and value projections have biases.
        output_bias: Whether the output projections have biases.
        mlp_bias: Whether the down projections have biases.
        ropes: Rotary embeddings; empty with learned positions.
        rope_by_layer: Index of each layer's embedding in `ropes`; empty if all layers use the first.
        windows: Numbers of tokens to each side that a token attends to, by layer; empty if it sees all.
        ignored: Further patterns of names of tensors that are not loaded.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    if hidden % heads:
        raise fields.error(
            fields.first_set(("hidden_size", "n_embd")), f"must be a multiple of {heads} heads"
        )
    if ropes and hidden // heads % 2:
        raise fields.error(
            fields.first_set(("hidden_size", "n_embd")), f"must be an even multiple of {heads} heads"
        )
    if read_quantization(fields).schemes:
        raise fields.unsupported(
            "quantization_config",
            f"describes quantized weights of {architecture}, which are supported for decoders only: use an "
            "unquantized checkpoint",
        )
    unused = () if encoder.head is not None else (r"^(\w+\.)?pooler\.", r"^classifier\.", r"^head\.")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        norm_epsilon=norm_epsilon,
        context_length=prompt_tokens,
        ropes=ropes,
        rope_by_layer=rope_by_layer,
        windows=windows or (None,) * layers,
        tie_embeddings=True,
        block=BlockConfig(
            activation=activation,
            names=TensorNames(prefix=encoder.names.prefix, embedding=encoder.names.embedding),
        ),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        dtype=read_dtype(fields),
        end_token_ids=read_token_ids(fields),
        ignored_tensors=(r"position_ids$", r"^cls\.", r"^lm_head\.", r"^decoder\.", *unused, *ignored),
        encoder=encoder,
        **read_task(fields, encoder),
    )


def read_task(fields: Fields, encoder: EncoderConfig) -> dict[str, Any]:
    """Read what an encoder computes, as fields of `ModelConfig`: embeddings, or logits of labels.

    Raises:
        ConfigError: the labels or their activation are invalid or not supported.
    """
    if encoder.head is None:
        return {"task": Task.EMBED, "pooling": Pooling.MEAN.value}
    labels = read_labels(fields)
    pooling = Pooling.MEAN if encoder.head.mean else Pooling.CLS
    return {
        "task": Task.CLASSIFY,
        "labels": labels,
        "score_activation": read_score_activation(fields, len(labels)),
        "pooling": pooling.value,
    }


def read_encoder_activation(fields: Fields, *names: str, default: str = "gelu") -> Activation:
    """Read an activation function without parameters.

    Raises:
        ConfigError: the function is not supported; the message names the field and the supported ones.
    """
    activation = read_activation(fields, *names, default=default)
    if activation is Activation.XIELU:
        supported = ", ".join(name for name, kind in ACTIVATIONS.items() if kind is not Activation.XIELU)
        raise fields.error(fields.first_set(names), f"must be one of {supported}")
    return activation


def check_absolute_positions(fields: Fields, supported: tuple[str, ...] = ("absolute",)) -> None:
    """Check that config.json does not describe relative positions.

    Raises:
        ConfigError: `position_embedding_type` is not one of `supported`.
    """
    if fields.values.get("position_embedding_type", supported[0]) not in supported:
        raise fields.error("position_embedding_type", f"must be {' or '.join(supported)}")


def is_classifier(architecture: str) -> bool:
    """Return whether an architecture has a classification head."""
    return architecture.endswith(CLASSIFICATION)
