# SPDX-License-Identifier: Apache-2.0
"""Merges the scales of layers that are computed together, without rounding.

The parts of a merged layer may have scales for different rows, and a rank's shard may begin or end inside a
block or group. The merged scales stand for the largest number of rows and columns for which they are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PartScales:
    """Scales of one part of a merged layer."""

    rows: slice
    """Rows of the merged layer."""
    row_step: int
    """Rows that share a scale."""
    offset: int
    """Rows before the part for which its first scale also stands."""
    scales: torch.Tensor
    """float32 [ceil((offset + rows) / row_step), groups]."""
    zeros: torch.Tensor | None = None
    """Zero points, uint8 of the same shape; None if the codes imply them."""
    groups: torch.Tensor
    """Group (column of `scales`) of each step of columns of the merged layer, int64 [column steps]."""

    def bounds(self) -> Iterable[int]:
        """Return rows of the merged layer between which all scales are the same."""
        first = self.rows.start + self.row_step - self.offset
        return (self.rows.start, *range(first, self.rows.stop, self.row_step), self.rows.stop)


def merge_bounds(bounds: Iterable[int], size: int, step: int = 0) -> int:
    """Return the largest divisor of `step` whose multiples include all bounds inside 0 .. size.

    Without any such bound, the result is `size`. If `step` is 0, the result need not be a divisor of it.
    """
    inside = [bound for bound in bounds if 0 < bound < size]
    return math.gcd(step, *inside) if inside else size


def merge_rows(parts: Sequence[PartScales], rows: int) -> int:
    """Return the number of rows of a merged layer that can share a scale."""
    if any(part.row_step == 1 for part in parts):
        return 1
    step = math.gcd(*(part.row_step for part in parts))
    return merge_bounds((bound for part in parts for bound in part.bounds()), rows, step)


def merge_scales(
    parts: Sequence[PartScales], rows: int, implied_zero: int
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Merge the scales and zero points of all parts.

    Args:
        parts: At least one part; rows beyond them are padding, and get scales of 0.
        rows: Rows of the merged layer.
        implied_zero: Zero point of parts without a tensor of zero points.

    Returns:
        Scales float32 [row steps, column steps], zero points uint8 of the same shape or None, and the rows of
        a step.
    """
    step = merge_rows(parts, rows)
    shape, device = (-(-rows // step), len(parts[0].groups)), parts[0].scales.device
    scales = torch.zeros(shape, device=device)
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.full(shape, implied_zero, dtype=torch.uint8, device=device)
    for part in parts:
        merged = slice(part.rows.start // step, -(-part.rows.stop // step))
        own_rows = torch.arange(merged.start, merged.stop, device=device) * step - part.rows.start
        which = (own_rows + part.offset) // part.row_step
        scales[merged] = part.scales[which][:, part.groups]
        if zeros is not None and part.zeros is not None:
            zeros[merged] = part.zeros[which][:, part.groups]
    return scales, zeros, step
