# SPDX-License-Identifier: Apache-2.0
"""Measures the weights of a checkpoint by the formats in which its tensors are stored."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from mizzen.inspection.model_files import WeightFiles
from mizzen.models.text_tensors import TextTensors
from mizzen.quantization.quantization import Quantization
from mizzen.quantization.schemes import (
    Mxfp4Weights,
    PackedIntegers,
    Unquantized,
    WeightScheme,
    describe_scheme,
)
from mizzen.quantization.stored_tensors import WORD_BITS, list_tensors
from mizzen.weights.checkpoint_files import is_needless

ELEMENT_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2}
"""Bytes of an element by its type, as safetensors names it; all other types have one byte."""
WEIGHTS = ("weight", "qweight", "weight_packed", "gate_up_proj_blocks", "down_proj_blocks")
"""Ends of the names of the tensors that hold a layer's quantized weight."""


class WeightFormat(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Tensors of a checkpoint that are stored in one format.

    Attributes:
        format: description of the format, or the data type of unquantized tensors.
        parameters: number of parameters; scales and zero points do not count.
        size: bytes of the tensors, with scales and zero points.
    """

    format: str
    parameters: int
    size: int


def measure_formats(
    weights: WeightFiles, quantization: Quantization, text_tensors: TextTensors | None
) -> tuple[WeightFormat, ...]:
    """Return the formats of a checkpoint's tensors, the largest first; none if the headers were not read.

    Args:
        weights: Files of the weights.
        quantization: Schemes of the layers.
        text_tensors: Tensors of the text part, if the checkpoint also holds other parts; only they count.

    Raises:
        ConfigError: Parts of a merged layer have different schemes.
    """
    parameters: defaultdict[str, int] = defaultdict(int)
    sizes: defaultdict[str, int] = defaultdict(int)
    for tensor, kind in weights.tensors.items():
        own = text_tensors.find_own_name(tensor) if text_tensors else tensor
        if own is None or is_needless(own):
            continue
        layer, _, suffix = own.rpartition(".")
        scheme, count = quantization.find_scheme(layer), weights.elements.get(tensor, 0)
        if is_stored(scheme, suffix, kind):
            name = describe_scheme(scheme)
            parameters[name] += count * count_packed_weights(scheme) if suffix in WEIGHTS else 0
        else:
            name = kind
            parameters[name] += count
        sizes[name] += count * ELEMENT_BYTES.get(kind, 1)
    formats = [
        WeightFormat(format=name, parameters=parameters[name], size=size) for name, size in sizes.items()
    ]
    return tuple(sorted(formats, key=lambda each: -each.size))


def count_packed_weights(scheme: WeightScheme) -> int:
    """Return the number of weights in an element of the tensor that holds them."""
    if isinstance(scheme, PackedIntegers):
        return WORD_BITS // scheme.bits
    return 2 if isinstance(scheme, Mxfp4Weights) else 1


def is_stored(scheme: WeightScheme, suffix: str, kind: str) -> bool:
    """Return whether a tensor with this suffix and data type belongs to a layer quantized by `scheme`."""
    if isinstance(scheme, Unquantized):
        return False
    return any(suffix in tensor.suffixes and kind in tensor.dtypes for tensor in list_tensors(scheme))
