# SPDX-License-Identifier: Apache-2.0
"""Reference of weights that are quantized while they are loaded, in NumPy, by the values of `--quantization`.

Each function returns the float32 weights that the codes and scales stand for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

import e4m3
from integer_codes import group_columns, round_to_integers


def row_scales(weight: np.ndarray, largest: float) -> np.ndarray:
    """Return float32 scales [rows, 1] that make the largest value of a row `largest`; 1 for zeros."""
    peaks = np.abs(weight).max(axis=1, keepdims=True)
    return np.where(peaks > 0, peaks / np.float32(largest), 1).astype(np.float32)


def round_to_fp8(weight: np.ndarray) -> np.ndarray:
    """Round the rows of a float32 weight to e4m3."""
    scales = row_scales(weight, e4m3.MAX)
    return e4m3.decode(e4m3.encode(weight / scales)) * scales


def round_to_int8(weight: np.ndarray) -> np.ndarray:
    """Round the rows of a float32 weight to integers from -127 to 127."""
    scales = row_scales(weight, 127)
    return np.rint(weight / scales).clip(-127, 127).astype(np.float32) * scales


def round_to_w4a16(weight: np.ndarray) -> np.ndarray:
    """Round groups of 128 columns of a float32 weight to integers of 4 bits, with scales in bfloat16."""
    groups = group_columns(weight.shape[1], 128)
    return round_to_integers(weight, groups, bits=4, symmetric=True, scale_dtype=torch.bfloat16).dequantize()


ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "fp8": round_to_fp8,
    "int8": round_to_int8,
    "w4a16": round_to_w4a16,
}
