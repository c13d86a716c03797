# SPDX-License-Identifier: Apache-2.0
"""Reference of the packing of 4-bit and 8-bit integers into int32 words, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Element of each group of eight that AWQ stores in the i-th nibble of a word, from the lowest."""


def pack(codes: np.ndarray, bits: int, axis: int, order: Sequence[int] | None = None) -> np.ndarray:
    """Pack unsigned integers of 4 or 8 bits along an axis into int32 words, the first in the lowest bits.

    Args:
        codes: Matrix of integers from 0 to 2**bits - 1. If its size along `axis` is not a multiple of 32 /
            bits, zeros complete the last word.
        bits: 4 or 8.
        axis: 0 or 1.
        order: Element of each group that is stored in the i-th place of a word; the identity by default.
    """
    places = 32 // bits
    rows = np.moveaxis(codes.astype(np.uint32), axis, -1)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % places)))
    groups = rows.reshape(len(rows), -1, places)
    words = np.zeros(groups.shape[:2], np.uint32)
    for place, element in enumerate(order or range(places)):
        words |= groups[:, :, element] << np.uint32(bits * place)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def unpack(
    words: np.ndarray, bits: int, axis: int, *, count: int | None = None, order: Sequence[int] | None = None
) -> np.ndarray:
    """Unpack int32 words into unsigned integers (int64), the inverse of `pack`.

    `count` is the number of elements along `axis` where the last word is not full.
    """
    places = 32 // bits
    rows = np.moveaxis(words.view(np.uint32), axis, -1)
    codes = np.empty((*rows.shape, places), np.int64)
    for place, element in enumerate(order or range(places)):
        codes[:, :, element] = rows >> np.uint32(bits * place) & np.uint32(2**bits - 1)
    return np.moveaxis(codes.reshape(len(rows), -1)[:, :count], -1, axis)
