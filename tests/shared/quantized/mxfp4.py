# SPDX-License-Identifier: Apache-2.0
"""Reference of MXFP4 in NumPy: blocks of 32 four-bit floats (E2M1) with a power of two as their scale.

It follows the OCP Microscaling Formats 1.0, and gpt-oss's layout: two codes in a byte, the first in the low
four bits.
"""

from __future__ import annotations

import numpy as np

BLOCK = 32
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
BIAS = 127


def quantize(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round a float32 weight [..., columns] to nearest.

    Returns:
        Codes, uint8 [..., columns / 32, 16], and exponents of the scales, uint8 [..., columns / 32].
    """
    blocks = weight.reshape(*weight.shape[:-1], -1, BLOCK)
    largest = np.abs(blocks).max(-1)
    exponents = np.floor(np.log2(np.maximum(largest, 2.0**-120))) - 2  # the largest value is 6, below 2 ** 3
    scaled = np.abs(blocks) / 2.0 ** exponents[..., None]
    codes = np.abs(scaled[..., None] - VALUES).argmin(-1) + 8 * (blocks < 0)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return np.ascontiguousarray(packed, np.uint8), np.ascontiguousarray(exponents + BIAS, np.uint8)


def dequantize(blocks: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Return the float32 weight [..., columns] for codes and exponents as `quantize` returns them."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], BLOCK)
    values = VALUES[codes & 7] * np.where(codes & 8, -1, 1)
    weight = values * np.ldexp(np.float64(1), exponents.astype(np.int64) - BIAS)[..., None]
    return weight.astype(np.float32).reshape(*weight.shape[:-2], -1)
