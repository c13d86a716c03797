# SPDX-License-Identifier: Apache-2.0
"""Names, types and shapes of the tensors in which a checkpoint stores a linear layer of each scheme.

A dimension of such a tensor follows the rows or the columns of the layer in steps: a step of 128 means that
one element stands for 128 rows, one of 8 that eight rows are packed into one word. Therefore the shapes of
the whole tensors, and the shards of ranks, follow from the layer's own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mizzen.quantization.schemes import (
    MXFP4_BLOCK,
    Activations,
    ActivationScales,
    Fp8Layout,
    Fp8Weights,
    Int8Weights,
    Mxfp4Weights,
    PackedIntegers,
    Packing,
    ScaleShape,
    Unquantized,
    WeightScheme,
)

WORD_BITS = 32
FLOATS = ("F32", "BF16", "F16")
"""Types of scales, as safetensors names them."""


UNUSED = ("weight_shape", "input_scale_ub", "input_zero_point")
"""Suffixes of tensors that are not loaded: the shapes of the others are known, the bound of inputs is in the
configuration, and inputs are never quantized with a zero point."""


class Follows(enum.StrEnum):
    """Dimension of a layer's weight that a dimension of a stored tensor follows."""

    ROWS = "rows"
    COLUMNS = "columns"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of a stored tensor."""

    follows: Follows
    step: int = 1
    """Number of rows or columns of the layer for each element; with `NEITHER`, the size of the dimension."""

    def size(self, rows: int, columns: int) -> int:
        """Return the size of the dimension for a layer [rows, columns]; the last step may be incomplete."""
        if self.follows is Follows.NEITHER:
            return self.step
        return -(-(rows if self.follows is Follows.ROWS else columns) // self.step)

    def shard(self, rows: slice, columns: slice) -> slice:
        """Return the elements that belong to some rows and columns of the layer.

        The elements at both ends also stand for other rows or columns if a step does not divide the bounds.
        """
        if self.follows is Follows.NEITHER:
            return slice(0, self.step)
        part = rows if self.follows is Follows.ROWS else columns
        return slice(part.start // self.step, -(-part.stop // self.step))


Dimensions = tuple[Dimension, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a layer in a checkpoint; its name is that of the layer, a dot and a suffix."""

    suffixes: tuple[str, ...]
    """Suffix of the name; exporters may use another suffix after the first."""
    dtypes: tuple[str, ...]
    """Types that the tensor may have, as safetensors names them."""
    dimensions: tuple[Dimensions, ...]
    """Dimensions of the tensor; exporters may use others after the first, with the same elements."""
    optional: bool = False
    """Whether a checkpoint may lack the tensor, because its values follow from the scheme."""

    def shapes(self, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the tensor may have for a layer [rows, columns]."""
        return tuple(tuple(each.size(rows, columns) for each in known) for known in self.dimensions)


ROWS, COLUMNS = Dimension(Follows.ROWS), Dimension(Follows.COLUMNS)
ONE = Dimension(Follows.NEITHER, 1)
MATRIX: tuple[Dimensions, ...] = ((ROWS, COLUMNS),)
SCALAR: tuple[Dimensions, ...] = ((), (ONE,), (ONE, ONE))
ROW_VECTOR: tuple[Dimensions, ...] = ((ROWS, ONE), (ROWS,))


def list_tensors(scheme: WeightScheme) -> tuple[StoredTensor, ...]:
    """Return the tensors that store a layer's weight in `scheme`; its bias is not among them."""
    match scheme:
        case Unquantized():
            return (StoredTensor(suffixes=("weight",), dtypes=FLOATS, dimensions=MATRIX),)
        case Fp8Weights():
            return _list_fp8(scheme)
        case PackedIntegers():
            return _list_packed(scheme)
        case Int8Weights():
            weight = StoredTensor(suffixes=("weight",), dtypes=("I8",), dimensions=MATRIX)
            scale = StoredTensor(
                suffixes=("weight_scale",),
                dtypes=FLOATS,
                dimensions=_scale_dimensions(scheme.scale_shape, None, scheme.group_size),
            )
            return weight, scale, *_list_input_tensors(scheme.activations)
        case Mxfp4Weights():
            return _list_mxfp4()


def find_dtypes(scheme: WeightScheme, suffix: str) -> tuple[str, ...]:
    """Return the types of a layer's tensor with a suffix; empty if it is no part of the stored weight."""
    if isinstance(scheme, Unquantized):
        return ()
    return next((each.dtypes for each in list_tensors(scheme) if suffix in each.suffixes), ())


def _list_fp8(scheme: Fp8Weights) -> tuple[StoredTensor, ...]:
    weight = StoredTensor(suffixes=("weight",), dtypes=("F8_E4M3",), dimensions=MATRIX)
    scale = StoredTensor(
        suffixes=_fp8_scale_suffixes(scheme),
        dtypes=(*FLOATS, "F8_E8M0"),
        dimensions=_scale_dimensions(scheme.scale_shape, scheme.block, None),
    )
    return weight, scale, *_list_input_tensors(scheme.activations, scheme.layout)


def _list_mxfp4() -> tuple[StoredTensor, ...]:
    """Return the tensors of the experts of a layer, which have one more dimension in front: the experts."""
    blocks = Dimension(Follows.COLUMNS, MXFP4_BLOCK)
    codes = Dimension(Follows.NEITHER, MXFP4_BLOCK // 2)
    return (
        StoredTensor(
            suffixes=("gate_up_proj_blocks", "down_proj_blocks"),
            dtypes=("U8",),
            dimensions=((ROWS, blocks, codes), (ROWS, Dimension(Follows.COLUMNS, 2))),
        ),
        StoredTensor(
            suffixes=("gate_up_proj_scales", "down_proj_scales"),
            dtypes=("U8",),
            dimensions=((ROWS, blocks),),
        ),
    )


def _fp8_scale_suffixes(scheme: Fp8Weights) -> tuple[str, ...]:
    if scheme.layout is not Fp8Layout.HUGGING_FACE:
        return ("weight_scale",)
    if scheme.scale_shape is ScaleShape.BLOCK:
        return ("weight_scale_inv",)
    return ("weight_scale", "weight_scale_inv")


def _scale_dimensions(
    shape: ScaleShape, block: tuple[int, int] | None, group_size: int | None
) -> tuple[Dimensions, ...]:
    if shape is ScaleShape.BLOCK and block is not None:
        rows, columns = Dimension(Follows.ROWS, block[0]), Dimension(Follows.COLUMNS, block[1])
        return ((rows, columns), (rows, ONE, columns, ONE))  # the second is ModelOpt's
    if shape is ScaleShape.GROUP and group_size is not None:
        return ((ROWS, Dimension(Follows.COLUMNS, group_size)),)
    return SCALAR if shape is ScaleShape.TENSOR else ROW_VECTOR


def _list_input_tensors(
    activations: Activations | None, layout: Fp8Layout | None = None
) -> tuple[StoredTensor, ...]:
    """Return the tensors of a layer's quantized inputs."""
    if layout is Fp8Layout.FBGEMM:
        bound = StoredTensor(suffixes=("input_scale_ub",), dtypes=FLOATS, dimensions=SCALAR, optional=True)
        return (bound,)
    if activations is None or activations.scales is not ActivationScales.STATIC:
        return ()
    suffixes = ("input_scale", "activation_scale") if layout is Fp8Layout.HUGGING_FACE else ("input_scale",)
    scale = StoredTensor(suffixes=suffixes, dtypes=FLOATS, dimensions=SCALAR)
    if activations.symmetric:
        return (scale,)
    return scale, StoredTensor(suffixes=("input_zero_point",), dtypes=("I8",), dimensions=SCALAR)


def _list_packed(scheme: PackedIntegers) -> tuple[StoredTensor, ...]:
    per_word = WORD_BITS // scheme.bits
    rows, columns = Dimension(Follows.ROWS, per_word), Dimension(Follows.COLUMNS, per_word)
    groups = Dimension(Follows.COLUMNS, scheme.group_size) if scheme.group_size else ONE
    order = StoredTensor(
        suffixes=("weight_g_idx" if scheme.packing is Packing.COMPRESSED_TENSORS else "g_idx",),
        dtypes=("I32",),
        dimensions=((COLUMNS,),),
        optional=not scheme.activation_order,
    )
    match scheme.packing:
        case Packing.AWQ:
            return (
                StoredTensor(suffixes=("qweight",), dtypes=("I32",), dimensions=((COLUMNS, rows),)),
                StoredTensor(suffixes=("qzeros",), dtypes=("I32",), dimensions=((groups, rows),)),
                StoredTensor(suffixes=("scales",), dtypes=FLOATS, dimensions=((groups, ROWS),)),
            )
        case Packing.GPTQ | Packing.GPTQ_V2:
            zeros = StoredTensor(
                suffixes=("qzeros",),
                dtypes=("I32",),
                dimensions=((groups, rows),),
                optional=scheme.symmetric,
            )
            return (
                StoredTensor(suffixes=("qweight",), dtypes=("I32",), dimensions=((columns, ROWS),)),
                zeros,
                StoredTensor(suffixes=("scales",), dtypes=FLOATS, dimensions=((groups, ROWS),)),
                order,
            )
        case Packing.COMPRESSED_TENSORS:
            zeros = StoredTensor(
                suffixes=("weight_zero_point",), dtypes=("I32",), dimensions=((rows, groups),)
            )
            shape = Dimension(Follows.NEITHER, 2)
            return (
                StoredTensor(suffixes=("weight_packed",), dtypes=("I32",), dimensions=((ROWS, columns),)),
                StoredTensor(suffixes=("weight_scale",), dtypes=FLOATS, dimensions=((ROWS, groups),)),
                StoredTensor(
                    suffixes=("weight_shape",), dtypes=("I64", "I32"), dimensions=((shape,),), optional=True
                ),
                *(() if scheme.symmetric else (zeros,)),
                *((order,) if scheme.activation_order else ()),
            )
