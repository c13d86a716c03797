# SPDX-License-Identifier: Apache-2.0
"""Computes the bytes of a model's weights in memory. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mizzen.layers.sharding import Axis
from mizzen.models.config import ModelConfig
from mizzen.models.parameters import count_parameters
from mizzen.quantization.schemes import (
    MXFP4_BLOCK,
    Fp8Weights,
    Int8Weights,
    Mxfp4Weights,
    PackedIntegers,
    Unquantized,
    WeightScheme,
)

ROW_SCALE_BYTES = 4
"""Bytes of a scale that stands for a row or a block: float32."""
GROUP_SCALE_BYTES = 2
"""Bytes of a scale that stands for a group of columns: bfloat16 or float16, as exporters store them."""
ORDER_BYTES = 4
"""Bytes of the input column that a column of a weight in activation order multiplies: int32."""


@dataclass(frozen=True, slots=True)
class LinearSize:
    """Size of one merged linear layer on one rank."""

    names: tuple[str, ...]
    """Names of the layers in the checkpoint that are computed together, without `.weight`."""
    rows: int
    columns: int
    count: int = 1
    """Number of layers of this size, which differs from 1 for those of experts."""


def count_weight_bytes(config: ModelConfig, element: int, ranks: int = 1) -> int:
    """Return the bytes of the weights that rank 0 of `ranks` ranks holds; with one rank, all of the model.

    Args:
        config: Configuration of the model, whose sizes can be divided among the ranks.
        element: Bytes of an element of unquantized weights.
        ranks: Number of ranks.
    """
    total = count_parameters(config, ranks) * element
    if not config.quantization.schemes:
        return total
    for layer in list_linear_sizes(config, ranks):
        scheme = config.quantization.find_merged_scheme(layer.names)
        if not isinstance(scheme, Unquantized):
            size = count_layer_bytes(scheme, layer.rows, layer.columns)
            total += layer.count * (size - layer.rows * layer.columns * element)
    return total


def list_linear_sizes(config: ModelConfig, ranks: int) -> Iterator[LinearSize]:
    """Yield the linear layers on rank 0 of `ranks` ranks that may be quantized."""
    names, hidden = config.block.names, config.hidden_size
    query = config.heads // ranks * config.head_dim
    key_value = max(1, config.kv_heads // ranks) * config.head_dim
    for layer in range(config.layers):
        prefix = f"{names.prefix}layers.{layer}."
        attention, mlp = f"{prefix}{names.attention}.", f"{prefix}{names.mlp}."
        projections = tuple(dict.fromkeys(attention + name for name in names.query_key_value))
        yield LinearSize(projections, query + 2 * key_value, hidden)
        yield LinearSize((attention + names.output,), hidden, query)
        width = config.intermediate_size
        if (experts := config.experts) is not None and experts.layers[layer]:
            block = f"{prefix}{experts.names.block}."
            mlp, width = f"{block}{experts.names.shared}.", experts.shared_width
            inner, count = experts.width // ranks, experts.count
            yield LinearSize(experts.gate_up_layers(block), inner, hidden, 2 * count)
            yield LinearSize(experts.down_layers(block), hidden, inner, count)
        if inner := width // ranks:
            inputs = tuple(mlp + name for name in names.gate_up)
            yield LinearSize(tuple(dict.fromkeys(inputs)), len(inputs) * inner, hidden)
            yield LinearSize((mlp + names.down,), hidden, inner)
    if not config.tie_embeddings:
        rows, _ = Axis(0, ranks).vocabulary_shard(config.vocab_size)
        yield LinearSize((names.head,), rows, hidden)


def count_layer_bytes(scheme: WeightScheme, rows: int, columns: int) -> int:
    """Return the bytes of a quantized weight [rows, columns] with its scales and zero points."""
    match scheme:
        case Unquantized():
            raise ValueError("the weight is not quantized")
        case Fp8Weights():
            height, width = scheme.block or (1, columns)
            return rows * columns + ROW_SCALE_BYTES * -(-rows // height) * -(-columns // width)
        case Int8Weights():
            return rows * columns + _count_scale_bytes(scheme.group_size, rows, columns)
        case PackedIntegers():
            codes = rows * columns * scheme.bits // 8
            zeros = 0 if scheme.symmetric else rows * -(-columns // (scheme.group_size or columns))
            order = ORDER_BYTES * columns if scheme.activation_order else 0
            return codes + _count_scale_bytes(scheme.group_size, rows, columns) + zeros + order
        case Mxfp4Weights():
            return rows * columns // 2 + rows * -(-columns // MXFP4_BLOCK)


def _count_scale_bytes(group_size: int | None, rows: int, columns: int) -> int:
    if not group_size:
        return ROW_SCALE_BYTES * rows
    return GROUP_SCALE_BYTES * rows * -(-columns // group_size)
