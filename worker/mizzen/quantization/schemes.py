# SPDX-License-Identifier: Apache-2.0
"""Schemes in which the weights of a linear layer are stored, and its activations quantized.

`WeightScheme` is the closed union of all schemes. A scheme describes the numbers alone; the names and shapes
of its tensors in a checkpoint are in `mizzen.quantization.stored_tensors`. In all formulas, a layer has a
weight w [rows, columns], that is, [outputs, inputs]; q is the stored value and s its scale.

Schemes are tagged structs, because ranks exchange configurations as JSON.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

SUPPORTED_BITS = (4, 8)
"""Numbers of bits of packed integers."""


class ScaleShape(enum.StrEnum):
    """Part of a weight that shares one scale."""

    TENSOR = "tensor"
    """The whole weight of a layer."""
    CHANNEL = "channel"
    """One output row."""
    BLOCK = "block"
    """A block of rows and columns; blocks at the end of the weight may be smaller."""
    GROUP = "group"
    """`group_size` consecutive columns of one output row."""


class ActivationScales(enum.StrEnum):
    """Scales by which the inputs of a layer are quantized."""

    TOKEN = "token"
    """One scale for each token, computed from its largest absolute value."""
    TOKEN_GROUP = "token_group"
    """One scale for each token and `group_size` consecutive columns, computed as for `TOKEN`."""
    TENSOR = "tensor"
    """One scale for all tokens of a batch, computed as for `TOKEN`."""
    STATIC = "static"
    """One scale for all tokens, stored in the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Quantization of a layer's inputs to the element type of its weights."""

    scales: ActivationScales
    group_size: int = 0
    """Columns that share a scale with `TOKEN_GROUP`; otherwise 0."""
    symmetric: bool = True
    """Whether there is no zero point; only inputs quantized to integers may have one."""
    upper_bound: float | None = None
    """Largest absolute value from which a scale is computed (`activation_scale_ub` of FBGEMM); None for none.
    Larger inputs saturate."""


class Fp8Layout(enum.StrEnum):
    """Names of the tensors of FP8 weights in a checkpoint."""

    HUGGING_FACE = "fp8"
    """`quant_method` fp8 of Transformers, DeepSeek and AutoFP8: `weight_scale_inv` or `weight_scale`."""
    FBGEMM = "fbgemm_fp8"
    """`quant_method` fbgemm_fp8 of Transformers."""
    COMPRESSED_TENSORS = "compressed-tensors"
    """Formats float-quantized and naive-quantized of compressed-tensors."""
    MODELOPT = "modelopt"
    """Checkpoints of NVIDIA's ModelOpt in its format for Hugging Face."""


class Unquantized(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Weights in a floating-point type of at least 16 bits."""


class Fp8Weights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Weights in FP8 E4M3 (arXiv 2209.05433, without infinities): w = q * s.

    The name `weight_scale_inv` of DeepSeek's and Qwen's checkpoints is misleading: it is s, too, not 1 / s.
    """

    scale_shape: ScaleShape
    """`TENSOR`, `CHANNEL` or `BLOCK`."""
    block: tuple[int, int] | None = None
    """Rows and columns of a block with `BLOCK`, usually 128 and 128; otherwise None."""
    activations: Activations | None
    """Quantization of the inputs to FP8; None for weights alone."""
    layout: Fp8Layout


class Packing(enum.StrEnum):
    """Way in which integers of 4 or 8 bits are packed into words of 32 bits."""

    AWQ = "awq"
    """Version gemm of AutoAWQ. `qweight` [columns, rows / 8] packs 8 rows into a word; element i of a word,
    from the low bits up, is row (0, 2, 4, 6, 1, 3, 5, 7)[i]. Zero points are packed in the same order."""
    GPTQ = "gptq"
    """`checkpoint_format` gptq (v1). `qweight` [columns * bits / 32, rows] packs columns, low bits first.
    Zero points are stored minus one: 1 is subtracted from each field by subtracting from whole 32-bit words,
    so that a zero point of 0 borrows from the next field."""
    GPTQ_V2 = "gptq_v2"
    """`checkpoint_format` gptq_v2: as `GPTQ`, but with the true zero points."""
    COMPRESSED_TENSORS = "pack-quantized"
    """Format pack-quantized of compressed-tensors. `weight_packed` [rows, columns * bits / 32] packs columns,
    low bits first, as unsigned integers q + 2 ** (bits - 1). Zero points are packed along the rows."""


class PackedIntegers(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Weights alone in integers of 4 or 8 bits (W4A16, W8A16), packed into words: w = (q - z) * s.

    q is from 0 to 2 ** bits - 1; the zero point z is stored, or 2 ** (bits - 1) if the weights are symmetric.
    A scale and a zero point belong to a group of columns of one output row.
    """

    bits: int
    """4 or 8."""
    group_size: int | None
    """Columns of a group; None if all columns of a row are one group (group size -1 in checkpoints)."""
    symmetric: bool
    """Whether all zero points are 2 ** (bits - 1). GPTQ stores them nevertheless."""
    activation_order: bool = False
    """Whether a tensor of the checkpoint (g_idx) gives the group of each column. Otherwise column k belongs
    to the group k // group_size."""
    packing: Packing

    def __post_init__(self) -> None:
        """Check the number of bits.

        Raises:
            ValueError: it is not supported.
        """
        if self.bits not in SUPPORTED_BITS:
            raise ValueError(f"bits must be 4 or 8, not {self.bits}")


class Int8Weights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Weights in signed integers of 8 bits, one byte each (W8A8 or W8A16): w = q * s.

    This is the format int-quantized of compressed-tensors.
    """

    scale_shape: ScaleShape
    """`TENSOR`, `CHANNEL` or `GROUP`; groups are for weights alone."""
    group_size: int | None = None
    """Columns of a group with `GROUP`; otherwise None."""
    activations: Activations | None
    """Quantization of the inputs to 8-bit integers; None for weights alone."""


class Mxfp4Weights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Experts' weights alone in MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss stores them: w = q * s.

    q is a 4-bit float (E2M1): 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign. A scale s, a power of two (E8M0),
    belongs to a block of `MXFP4_BLOCK` columns of one output row.
    """


MXFP4_BLOCK = 32
"""Columns that share a scale in MXFP4."""

WeightScheme = Unquantized | Fp8Weights | PackedIntegers | Int8Weights | Mxfp4Weights
"""Scheme of one linear layer."""

UNQUANTIZED = Unquantized()


class KvScales(enum.StrEnum):
    """Scales of an 8-bit KV cache that a checkpoint holds."""

    LAYER = "layer"
    """One scale for the keys of a layer, and one for its values."""
    HEAD = "head"
    """One scale for each KV head of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvScheme:
    """Keys and values in FP8 E4M3, for which a checkpoint is made; it may hold their scales."""

    scales: KvScales = KvScales.LAYER


def describe_scheme(scheme: WeightScheme) -> str:
    """Return a short name of a scheme, such as "FP8, blocks of 128 x 128"."""
    match scheme:
        case Unquantized():
            return "unquantized"
        case Fp8Weights():
            if scheme.block is not None:
                return f"FP8, blocks of {scheme.block[0]} x {scheme.block[1]}"
            return f"FP8, a scale for each {scheme.scale_shape}"
        case PackedIntegers():
            groups = f"groups of {scheme.group_size}" if scheme.group_size else "a scale for each channel"
            order = ", in activation order" if scheme.activation_order else ""
            return f"{scheme.bits}-bit integers, {groups}{order}"
        case Int8Weights():
            groups = f"groups of {scheme.group_size}" if scheme.group_size else ""
            return f"INT8, {groups or f'a scale for each {scheme.scale_shape}'}"
        case Mxfp4Weights():
            return f"MXFP4, blocks of {MXFP4_BLOCK}"
