# SPDX-License-Identifier: Apache-2.0
"""Reference of the rounding of weights to integers, with a scale and a zero point for groups of columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, eq=False)
class IntegerCodes:
    """A weight matrix [rows, columns] as unsigned integers: weight = (code - zero) * scale."""

    codes: np.ndarray
    """Integers from 0 to 2**bits - 1, [rows, columns]."""
    zeros: np.ndarray
    """Integer zero points, [rows, groups]."""
    scales: np.ndarray
    """float32 scales, [rows, groups]."""
    groups: np.ndarray
    """Group of each column, [columns]."""

    def dequantize(self) -> np.ndarray:
        """Return the weights in float32; each is one product, rounded once."""
        steps = (self.codes - self.zeros[:, self.groups]).astype(np.float32)
        return steps * self.scales[:, self.groups]


def group_columns(columns: int, group_size: int) -> np.ndarray:
    """Return the group of each column, where neighbours form a group; a size of -1 makes one group."""
    return np.arange(columns) // (group_size if group_size > 0 else columns)


def shuffle_groups(columns: int, group_size: int, rng: np.random.Generator) -> np.ndarray:
    """Return the group of each column for an act-order: groups of equal size whose columns are anywhere."""
    return rng.permutation(group_columns(columns, group_size))


def round_to_integers(
    weight: np.ndarray, groups: np.ndarray, *, bits: int, symmetric: bool, scale_dtype: torch.dtype
) -> IntegerCodes:
    """Round a float32 weight [rows, columns] to the nearest integers.

    Args:
        weight: Weight matrix.
        groups: Group of each column, from 0.
        bits: Bits of an integer.
        symmetric: Whether the zero point is the middle, 2**(bits - 1); else the range of each group
            determines it.
        scale_dtype: Type in which the scales will be stored, to which they are rounded.
    """
    top, count = 2**bits - 1, groups.max() + 1
    members = [weight[:, groups == group] for group in range(count)]
    high = np.stack([part.max(axis=1) for part in members], axis=1)
    low = np.stack([part.min(axis=1) for part in members], axis=1)
    if symmetric:
        high = np.maximum(np.abs(high), np.abs(low))
        low = -high
    else:
        high, low = np.maximum(high, 0), np.minimum(low, 0)
    scales = round_to_dtype(np.where(high > low, (high - low) / top, 1), scale_dtype)
    zeros = np.full(scales.shape, 2 ** (bits - 1)) if symmetric else np.clip(np.rint(-low / scales), 0, top)
    zeros = zeros.astype(np.int64)
    codes = np.rint(weight / scales[:, groups]) + zeros[:, groups]
    return IntegerCodes(np.clip(codes, 0, top).astype(np.int64), zeros, scales, groups)


def round_to_dtype(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Round values to a torch dtype; return them in float32."""
    return torch.from_numpy(values.astype(np.float32)).to(dtype).float().numpy()
