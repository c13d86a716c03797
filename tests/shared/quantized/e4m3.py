# SPDX-License-Identifier: Apache-2.0
"""Reference of the 8-bit float e4m3 (finite variant), in NumPy and from its definition alone.

One sign bit, four exponent bits with bias 7, and three mantissa bits. There are no infinities; the two codes
0x7f and 0xff are NaN, so the largest finite value is 448.
"""

from __future__ import annotations

import numpy as np

MAX = 448.0
"""Largest finite value."""
NAN_CODES = (0x7F, 0xFF)


def magnitude(code: int) -> float:
    """Return the value of a code from 0 to 126, whose sign bit is 0."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


MAGNITUDES = np.array([magnitude(code) for code in range(127)])
"""Finite magnitudes in the order of their codes, which is ascending."""
MIDPOINTS = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
VALUES = np.array([*MAGNITUDES, np.nan, *-MAGNITUDES, np.nan], np.float32)
"""Value of each of the 256 codes."""


def encode(values: np.ndarray) -> np.ndarray:
    """Round finite values to the nearest e4m3 value, ties to even; larger magnitudes saturate at 448.

    Args:
        values: Floating-point array.

    Returns:
        uint8 codes, in the shape of `values`.
    """
    size = np.abs(values.astype(np.float64))
    codes = np.searchsorted(MIDPOINTS, size, side="left")
    ties = (size == MIDPOINTS[np.minimum(codes, len(MIDPOINTS) - 1)]) & (codes % 2 == 1)
    return ((codes + ties) | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def decode(codes: np.ndarray) -> np.ndarray:
    """Return the float32 values of uint8 codes; NaN for the codes 0x7f and 0xff."""
    return VALUES[codes]
