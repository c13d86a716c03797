# SPDX-License-Identifier: Apache-2.0
"""Checks that the quantized layers of a model can be merged, and sharded over ranks.

Scales can be repeated wherever a shard begins, but words into which several integers are packed cannot be
divided. This module does not import torch, because `mizzen inspect` uses it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mizzen.models.config import ModelConfig
from mizzen.quantization.schemes import Mxfp4Weights, PackedIntegers, WeightScheme, describe_scheme
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
    """Yield the merged layers of all decoder layers of a model, but those of experts."""
    names, head_dim = config.block.names, config.head_dim
    heads = (config.heads, head_dim)
    for layer in range(config.layers):
        prefix = f"{names.prefix}layers.{layer}."
        attention, mlp = f"{prefix}{names.attention}.", f"{prefix}{names.mlp}."
        projections = tuple(attention + name for name in names.query_key_value)
        yield MergedLayer(projections, Follows.ROWS, (heads, (config.kv_heads, head_dim)))
        yield MergedLayer((attention + names.output,), Follows.COLUMNS, (heads,))
        intermediate = config.intermediate_size
        if (experts := config.experts) is not None and experts.layers[layer]:
            mlp, intermediate = f"{prefix}{experts.names.block}.{experts.names.shared}.", experts.shared_width
        if units := ((intermediate, 1),) if intermediate else ():
            yield MergedLayer(tuple(mlp + name for name in names.gate_up), Follows.ROWS, units)
            yield MergedLayer((mlp + names.down,), Follows.COLUMNS, units)


def list_expert_layers(config: ModelConfig) -> Iterator[MergedLayer]:
    """Yield the projections of the experts of all layers of a model, each with those of all experts."""
    if (experts := config.experts) is None:
        return
    for layer in (layer for layer, sparse in enumerate(experts.layers) if sparse):
        prefix = f"{config.block.names.prefix}layers.{layer}.{experts.names.block}."
        yield MergedLayer(experts.gate_up_layers(prefix), Follows.ROWS, ((experts.width, 1),))
        yield MergedLayer(experts.down_layers(prefix), Follows.COLUMNS, ((experts.width, 1),))


def check_merged_layers(config: ModelConfig) -> None:
    """Check that layers that are computed together have the same scheme, as all experts of a layer must.

    Raises:
        ConfigError: They differ; the message names them.
    """
    if not config.quantization.schemes:
        return
    for layer in list_merged_layers(config):
        config.quantization.find_merged_scheme(layer.names)
    experts = tuple(list_expert_layers(config))
    for gate_up, down in zip(experts[::2], experts[1::2], strict=True):
        config.quantization.find_merged_scheme(gate_up.names + down.names)


def find_divided_word(config: ModelConfig, ranks: int) -> str:
    """Return which layer cannot be sharded over ranks, because a packed word would be divided; or nothing."""
    if ranks == 1 or not any(isinstance(each, PackedIntegers) for each in config.quantization.schemes):
        return ""
    found = (_find_divided_word(config, layer, ranks, "tensor ranks") for layer in list_merged_layers(config))
    return next(filter(None, found), "")


def find_divided_expert(config: ModelConfig, ranks: int, owners: str) -> str:
    """Return why the experts' widths cannot be sharded over ranks, because of their scheme; or nothing.

    `owners` are these ranks in words.

    Packed words cannot be divided. Of columns in activation order, each expert would have other groups on
    each rank.
    """
    if ranks == 1 or not any(isinstance(each, PackedIntegers) for each in config.quantization.schemes):
        return ""
    for layer in list_expert_layers(config):
        scheme = config.quantization.find_merged_scheme(layer.names)
        ordered = isinstance(scheme, PackedIntegers) and scheme.activation_order
        if ordered and layer.follows is Follows.COLUMNS:
            return (
                f"{layer.names[0]} ({describe_scheme(scheme)}) cannot be divided among {ranks} {owners}, "
                "because each expert has an order of its own"
            )
        if problem := _find_divided_word(config, layer, ranks, owners):
            return problem
    return ""


def find_divided_byte(config: ModelConfig, ranks: int, owners: str) -> str:
    """Return why experts in MXFP4 cannot be sharded over ranks, two weights being in a byte; or nothing.

    `owners` are these ranks in words.
    """
    experts = config.experts
    if experts is None or not any(isinstance(each, Mxfp4Weights) for each in config.quantization.schemes):
        return ""
    if experts.width // ranks % 2 == 0:
        return ""
    return (
        f"{experts.width_field} ({experts.width}) cannot be divided among {ranks} {owners} in MXFP4: the "
        "share of a rank must be even"
    )


def _find_divided_word(config: ModelConfig, layer: MergedLayer, ranks: int, owners: str) -> str:
    """Return why a layer cannot be sharded over ranks, because a packed word would be divided; or nothing.

    `owners` are these ranks in words.
    """
    scheme = config.quantization.find_merged_scheme(layer.names)
    multiple = count_packed(scheme, layer.follows)
    if not any(share % multiple for share in layer.shares(ranks)):
        return ""
    return (
        f"{layer.names[0]} ({describe_scheme(scheme)}) cannot be divided among {ranks} {owners}: "
        f"the {layer.follows} of a rank must be a multiple of the {multiple} in a packed word"
    )


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
