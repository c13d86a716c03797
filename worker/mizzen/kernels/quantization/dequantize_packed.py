# SPDX-License-Identifier: Apache-2.0
"""Restores weights of the fragment layout as bfloat16, for GEMMs of large batches.

The restored weight equals the rounded weight of `QuantizedWeight.dequantize`, bit for bit. The kernel moves
each byte once, so it takes about as long as reading the restored weight twice; a GEMM of more than a few
hundred rows takes longer by far.
"""

from __future__ import annotations

import functools

import torch

from mizzen.kernels.gemm.fragments import STRIP_ROWS, PackedWeight, ScaleLayout
from mizzen.kernels.nvrtc import KernelSpec, launch, load_kernel, read_source
from mizzen.layers.quantized.canonical import Codes

CHUNK_COLUMNS = 64
"""Columns of a chunk, which a warp restores at a time."""
CHUNKS = {4: 4, 8: 2}
"""Number of chunks of a block by the bits of the codes; each thread keeps 64 bytes of codes in flight."""
STEP_COLUMNS = 16
"""Columns of a k-step, which must share a scale."""
LAYOUTS = {ScaleLayout.ROW: 0, ScaleLayout.OCTET: 1, ScaleLayout.GROUP: 2}
SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def supports(weight: PackedWeight) -> bool:
    """Return whether `dequantize_packed` supports the shape and the groups of a weight."""
    grouped = weight.groups > 1
    return weight.columns % 8 == 0 and not (grouped and weight.group_columns % STEP_COLUMNS)


@functools.cache
def kernel_source() -> str:
    """Return the complete source of the kernel."""
    return read_source("bf16") + read_source("quantization/dequantize_packed")


def kernel_spec(weight: PackedWeight) -> KernelSpec:
    """Return the spec of the kernel for a weight."""
    bits = 4 if weight.codes is Codes.UINT4 else 8
    defines = (
        ("BITS", bits),
        ("E4M3", int(weight.codes is Codes.E4M3)),
        ("LAYOUT", LAYOUTS[weight.scale_layout]),
        ("SCALE_TYPE", SCALE_TYPES[weight.scales.dtype]),
        ("ZEROS", int(weight.zeros is not None)),
        ("IMPLIED_ZERO", weight.implied_zero),
        ("SWIGLU", int(weight.swiglu)),
        ("CHUNKS", CHUNKS[bits]),
    )
    return kernel_source(), "dequantize_packed", defines


def rows_of_strips(weight: PackedWeight, first: int, stop: int) -> int:
    """Return the number of rows, without padding, of the strips from `first` to before `stop`."""
    rows = weight.rows
    return max(0, min(stop * STRIP_ROWS, rows) - min(first * STRIP_ROWS, rows))


def dequantize_packed(
    weight: PackedWeight, out: torch.Tensor, first: int = 0, stop: int | None = None
) -> None:
    """Write the weights of the strips from `first` to before `stop` to `out`.

    Args:
        weight: Weight in the fragment layout.
        out: bfloat16 [rows of the strips, columns], contiguous. With `weight.swiglu`, the gate rows of the
            strips come first, then their up rows.
        first: First strip.
        stop: End of the strips; by default all that follow.
    """
    stop = weight.strips if stop is None else stop
    bits = 4 if weight.codes is Codes.UINT4 else 8
    chunks = weight.padded_columns // CHUNK_COLUMNS
    function = load_kernel(*kernel_spec(weight), out.device.index or 0)
    sizes = (chunks, weight.columns, weight.group_columns, weight.groups, first, len(out))
    launch(
        function,
        (-(-chunks // CHUNKS[bits]), stop - first, 1),
        128,
        (weight.values, weight.scales, weight.zeros, out, *sizes),
    )
