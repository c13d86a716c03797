# SPDX-License-Identifier: Apache-2.0
"""Converts the stored tensors of a layer to the canonical form.

Conversion works on tiles of rows, so that it needs little memory besides the converted layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mizzen.layers.quantized.canonical import IMPLIED_ZEROS, Codes, QuantizedWeight, narrow_scales
from mizzen.layers.quantized.column_order import ColumnOrder, keep_order, order_columns
from mizzen.layers.quantized.merge_scales import PartScales, merge_scales
from mizzen.layers.quantized.packed_words import (
    pack_pairs,
    read_codes,
    read_scales,
    read_zeros,
    unpack_pairs,
)
from mizzen.layers.quantized.stored_layer import StoredLayer, StoredPart
from mizzen.quantization.schemes import Fp8Weights, Int8Weights, PackedIntegers, Packing, ScaleShape
from mizzen.quantization.stored_tensors import WORD_BITS

TILE_ROWS = 1024
"""Rows that are converted at a time; a multiple of the eight rows in a word."""
E4M3_NAN = 0x7F
"""Code of NaN in e4m3, without its sign."""


def convert_layer(layer: StoredLayer) -> QuantizedWeight:
    """Convert the loaded tensors of a layer, which are freed.

    Raises:
        WeightsError: A tensor has invalid values; the message names it.
    """
    scheme = layer.scheme
    if isinstance(scheme, PackedIntegers):
        return _convert_packed(layer, scheme)
    if isinstance(scheme, Fp8Weights | Int8Weights):
        return _convert_scaled(layer, scheme)
    raise ValueError(f"{scheme} is not a scheme of quantized weights")


def _convert_scaled(layer: StoredLayer, scheme: Fp8Weights | Int8Weights) -> QuantizedWeight:
    """Convert weights with one code in a byte."""
    spec, parts = layer.spec, layer.parts
    is_fp8 = isinstance(scheme, Fp8Weights)
    row_step, size = _scaled_steps(scheme)
    order = keep_order(parts[0].part.columns, size, len(parts), spec.device)
    suffix = next(name for name in parts[0].tensors if name.startswith("weight_scale"))
    scales = []
    for stored, groups in zip(parts, order.groups, strict=True):
        step = row_step or stored.part.shape[0]
        scales.append(
            PartScales(
                rows=stored.part.merged_rows,
                row_step=step,
                offset=stored.part.rows.start % step,
                scales=_check_scales(stored, suffix, stored.tensors[suffix].view(-1, int(groups.max()) + 1)),
                groups=groups,
            )
        )
    merged, _, step = merge_scales(scales, spec.rows, 0)
    inputs = [_read_input_scale(stored) for stored in parts if "input_scale" in stored.tensors]
    return QuantizedWeight(
        codes=Codes.E4M3 if is_fp8 else Codes.INT8,
        values=_merge_values(layer, check_nan=is_fp8),
        scales=merged if size is None or is_fp8 else narrow_scales(merged, torch.bfloat16, torch.float16),
        row_step=step,
        column_step=order.step,
        activations=scheme.activations,
        input_scale=max(inputs, default=0.0),
    )


def _scaled_steps(scheme: Fp8Weights | Int8Weights) -> tuple[int | None, int | None]:
    """Return the rows and columns that share a scale; None for all of the layer in the checkpoint."""
    if isinstance(scheme, Fp8Weights) and scheme.block is not None:
        return scheme.block
    size = scheme.group_size if isinstance(scheme, Int8Weights) else None
    return None if scheme.scale_shape is ScaleShape.TENSOR else 1, size


def _merge_values(layer: StoredLayer, *, check_nan: bool) -> torch.Tensor:
    """Return the codes of all parts, float8_e4m3fn or int8 [rows, columns]; padding is 0.

    Raises:
        WeightsError: A code is NaN, and `check_nan` is set.
    """
    spec, parts = layer.spec, layer.parts
    if check_nan:
        for stored in parts:
            codes = stored.tensors["weight"].view(torch.uint8)
            if any(bool((codes[rows] & E4M3_NAN == E4M3_NAN).any()) for rows in _tiles(stored.rows)):
                raise stored.error("weight", "contains NaN")
    if layer.codes.numel() == spec.rows * spec.columns:
        return layer.codes.view(spec.rows, spec.columns)
    values = torch.zeros(spec.rows, spec.columns, dtype=torch.uint8, device=spec.device)
    for stored in parts:
        values[stored.part.merged_rows] = stored.tensors["weight"].view(torch.uint8)
    return values.view(layer.codes.dtype)


def _convert_packed(layer: StoredLayer, scheme: PackedIntegers) -> QuantizedWeight:
    """Convert integers that are packed into words."""
    spec, parts = layer.spec, layer.parts
    codes = Codes.UINT4 if scheme.bits == 4 else Codes.UINT8
    order = order_columns(parts, scheme, spec.device)
    zeros = [read_zeros(stored, scheme) for stored in parts]
    scales = [
        PartScales(
            rows=stored.part.merged_rows,
            row_step=1,
            offset=0,
            scales=_check_scales(stored, *read_scales(stored, scheme)),
            zeros=own_zeros,
            groups=groups,
        )
        for stored, own_zeros, groups in zip(parts, zeros, order.groups, strict=True)
    ]
    merged, merged_zeros, step = merge_scales(scales, spec.rows, IMPLIED_ZEROS[codes])
    values = _merge_words(layer, scheme) if order.source is None else None
    if values is None:
        shape = (spec.rows, order.columns * scheme.bits // 8)
        values = torch.zeros(shape, dtype=torch.uint8, device=spec.device)
        for stored in parts:
            own_values, own_zeros = values[stored.part.merged_rows], None
            for rows in _tiles(stored.rows):
                tile = read_codes(stored, scheme, rows)
                if order.source is not None:
                    if merged_zeros is not None:
                        own_zeros = merged_zeros[stored.part.merged_rows][rows]
                    tile = _sort_codes(tile, order, codes, own_zeros)
                own_values[rows] = tile
    return QuantizedWeight(
        codes=codes,
        values=values,
        scales=narrow_scales(merged, torch.bfloat16, torch.float16) if order.step < order.columns else merged,
        row_step=step,
        column_step=order.step,
        zeros=merged_zeros,
        order=None if order.source is None else order.source.int(),
    )


def _merge_words(layer: StoredLayer, scheme: PackedIntegers) -> torch.Tensor | None:
    """Return the words of all parts as bytes if these are the merged codes already; None if they are not."""
    bits = layer.spec.columns * scheme.bits
    if scheme.packing is not Packing.COMPRESSED_TENSORS or bits % WORD_BITS:
        return None
    if layer.codes.nbytes != layer.spec.rows * bits // 8:  # rows of padding are missing
        return None
    return layer.codes.view(torch.uint8).view(layer.spec.rows, bits // 8)


def _sort_codes(
    values: torch.Tensor, order: ColumnOrder, codes: Codes, zeros: torch.Tensor | None
) -> torch.Tensor:
    """Sort the columns of codes; columns that fill a group get its zero point.

    Args:
        values: uint8 [rows, bytes].
        order: Order of the columns.
        codes: Type of the codes.
        zeros: Zero points, uint8 [rows, column steps]; None if the codes imply them.
    """
    unpacked = unpack_pairs(values) if codes is Codes.UINT4 else values
    unpacked = unpacked[:, order.source]
    if order.filler is not None:
        implied = IMPLIED_ZEROS[codes]
        unpacked[:, order.filler] = implied if zeros is None else zeros[:, order.filler // order.step]
    return pack_pairs(unpacked) if codes is Codes.UINT4 else unpacked


def _tiles(rows: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `TILE_ROWS` of a number of rows."""
    for first in range(0, rows, TILE_ROWS):
        yield slice(first, min(first + TILE_ROWS, rows))


def _check_scales(stored: StoredPart, suffix: str, scales: torch.Tensor) -> torch.Tensor:
    """Return scales, which must be finite; some exporters also write negative scales.

    Raises:
        WeightsError: A scale is infinite or NaN.
    """
    if not torch.isfinite(scales).all():
        raise stored.error(suffix, "contains infinite numbers or NaN")
    return scales


def _read_input_scale(stored: StoredPart) -> float:
    """Return the static scale of a part's inputs.

    Raises:
        WeightsError: It is not a positive number.
    """
    scale = float(stored.tensors["input_scale"])
    if not 0 < scale < float("inf"):
        raise stored.error("input_scale", f"must be a positive number, not {scale}")
    return scale
