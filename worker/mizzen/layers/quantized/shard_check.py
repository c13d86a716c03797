# SPDX-License-Identifier: Apache-2.0
"""Checks that the quantized layers of a model can be merged, and sharded over ranks.

Scales can be repeated wherever a shard begins, but words into which several integers are packed cannot be
divided. This module does not import torch, because `mizzen inspect` uses it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mizzen.models.config import ModelConfig
from mizzen.quantization.schemes import PackedIntegers, WeightScheme, describe_scheme
from mizzen.quantization.stored_tensors import WORD_BITS, Follows, list_tensors


@dataclass(frozen=True, slots=True)
class MergedLayer:
    """Linear layers that are computed together, and their division among ranks."""

    names: tuple[str, ...]
    follows: Follows
    """Dimension that is divided."""
    units: tuple[tuple[int, int], ...]
    """Pairs (count, size): `count` units of `size` rows or columns (heads) are divided among ranks."""

    def shares(self, ranks: int) -> tuple[int, ...]:
        """Return the rows or columns of a rank; with fewer units than ranks, ranks hold the same unit."""
        return tuple(max(1, count // ranks) * size for count, size in self.units)


def list_merged_layers(config: ModelConfig) -> Iterator[MergedLayer]:
    """Yield the merged layers of all decoder layers of a model."""
    names, head_dim = config.block.names, config.head_dim
    heads = (config.heads, head_dim)
    for layer in range(config.layers):
        prefix = f"{names.prefix}layers.{layer}."
        attention, mlp = f"{prefix}{names.attention}.", f"{prefix}{names.mlp}."
        projections = tuple(attention + name for name in names.query_key_value)
        yield MergedLayer(projections, Follows.ROWS, (heads, (config.kv_heads, head_dim)))
        yield MergedLayer((attention + names.output,), Follows.COLUMNS, (heads,))
        intermediate = ((config.intermediate_size, 1),)
        yield MergedLayer(tuple(mlp + name for name in names.gate_up), Follows.ROWS, intermediate)
        yield MergedLayer((mlp + names.down,), Follows.COLUMNS, intermediate)


def check_merged_layers(config: ModelConfig) -> None:
    """Check that layers that are computed together have the same scheme.

    Raises:
        ConfigError: They differ; the message names them.
    """
    if config.quantization.schemes:
        for layer in list_merged_layers(config):
            config.quantization.find_merged_scheme(layer.names)


def find_divided_word(config: ModelConfig, ranks: int) -> str:
    """Return which layer cannot be sharded over ranks, because a packed word would be divided; or nothing."""
    if ranks == 1 or not any(isinstance(each, PackedIntegers) for each in config.quantization.schemes):
        return ""
    for layer in list_merged_layers(config):
        scheme = config.quantization.find_merged_scheme(layer.names)
        multiple = count_packed(scheme, layer.follows)
        if any(share % multiple for share in layer.shares(ranks)):
            return (
                f"{layer.names[0]} ({describe_scheme(scheme)}) cannot be divided among {ranks} tensor ranks: "
                f"the {layer.follows} of a rank must be a multiple of the {multiple} in a packed word"
            )
    return ""


def count_packed(scheme: WeightScheme, follows: Follows) -> int:
    """Return the number of rows or columns whose integers are packed into one word; 1 if they are not."""
    if not isinstance(scheme, PackedIntegers):
        return 1
    per_word = WORD_BITS // scheme.bits
    dimensions = (
        dimension
        for tensor in list_tensors(scheme)
        if tensor.dtypes == ("I32",)
        for dimension in tensor.dimensions[0]
    )
    packed = any(each.follows is follows and each.step == per_word for each in dimensions)
    return per_word if packed else 1
