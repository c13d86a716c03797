# SPDX-License-Identifier: Apache-2.0
"""Order of the columns of packed integers: in activation order, columns are sorted by their groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from mizzen.layers.quantized.merge_scales import merge_bounds
from mizzen.layers.quantized.stored_layer import StoredPart
from mizzen.quantization.schemes import PackedIntegers, Packing

MULTIPLE = 32
"""Groups are filled up to a multiple of this number of columns."""
MAX_GROWTH = 2
"""Largest factor by which filling up may increase the number of columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnOrder:
    """Columns of a merged weight and the groups that they belong to."""

    step: int
    """Columns that share a scale."""
    groups: tuple[torch.Tensor, ...]
    """For each part, the group of each step, int64 [column steps]."""
    columns: int
    """Number of columns, including columns that only fill a group."""
    source: torch.Tensor | None = None
    """Column of the checkpoint for each column, int64 [columns]; None for the checkpoint's order."""
    filler: torch.Tensor | None = None
    """Columns that only fill a group, int64; None without such columns."""


def keep_order(columns: slice, group_size: int | None, parts: int, device: torch.device) -> ColumnOrder:
    """Return the order of columns whose groups are consecutive.

    Args:
        columns: Columns of the checkpoint's layer that this rank holds.
        group_size: Columns of a group; None for one group.
        parts: Number of parts.
        device: Device of the weight.
    """
    count = columns.stop - columns.start
    size = group_size or columns.stop
    first = columns.start // size
    step = merge_bounds(range(first * size + size - columns.start, count, size), count, size)
    groups = (torch.arange(0, count, step, device=device) + columns.start) // size - first
    return ColumnOrder(step=step, groups=(groups,) * parts, columns=count)


def order_columns(parts: Sequence[StoredPart], scheme: PackedIntegers, device: torch.device) -> ColumnOrder:
    """Return the order of the columns of packed integers.

    Raises:
        WeightsError: The tensor with the group of each column has an invalid value.
    """
    columns = parts[0].part.columns
    suffix = "weight_g_idx" if scheme.packing is Packing.COMPRESSED_TENSORS else "g_idx"
    indices = [part.tensors[suffix].cpu().long() for part in parts if suffix in part.tensors]
    if not scheme.activation_order:
        size = scheme.group_size or columns.stop
        expected = torch.arange(columns.start, columns.stop) // size
        for part, groups in zip(parts, indices, strict=False):
            if not torch.equal(groups, expected):
                raise part.error(suffix, "orders columns, but the configuration describes no such order")
        return keep_order(columns, scheme.group_size, len(parts), device)
    for part, groups in zip(parts, indices, strict=True):
        count = -(-part.part.shape[1] // (scheme.group_size or part.part.shape[1]))
        if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < count:
            raise part.error(suffix, f"names groups outside 0 .. {count - 1}")
    return sort_columns(torch.stack(indices), device)


def sort_columns(indices: torch.Tensor, device: torch.device) -> ColumnOrder:
    """Return the order that sorts columns by their groups (int64 [parts, columns]) in all parts.

    Layers with the same inputs have the same groups in real checkpoints. If they differ, few columns or only
    one belong to the same groups in all parts, so that scales need more memory, but stay exact.
    """
    order = torch.arange(indices.shape[1])
    for groups in indices.unique(dim=0).flip(0):
        order = order[torch.argsort(groups[order], stable=True)]
    ordered = indices[:, order]
    starts = [0, *(1 + torch.nonzero((ordered.diff(dim=1) != 0).any(dim=0)).flatten()).tolist()]
    count = len(order)
    step = merge_bounds(starts, count)
    filler: torch.Tensor | None = None
    if step % MULTIPLE and len(starts) > 1:
        filled, is_filler = fill_runs(order, [*starts, count])
        if len(filled) <= MAX_GROWTH * count:
            order, filler, step = filled, is_filler.nonzero().flatten(), MULTIPLE
    # The first column of a step is no filler, because a run is filled up at its end by less than a step.
    groups = indices[:, order[::step]]
    kept = filler is None and torch.equal(order, torch.arange(count))
    return ColumnOrder(
        step=step,
        groups=tuple(groups.to(device)),
        columns=len(order),
        source=None if kept else order.to(device),
        filler=None if filler is None else filler.to(device),
    )


def fill_runs(order: torch.Tensor, bounds: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill each run of columns up to a multiple of `MULTIPLE` with column 0.

    Returns:
        The longer order, int64, and which of its columns are filled in, bool.
    """
    filled, flags = [], []
    for start, stop in pairwise(bounds):
        padding = -(stop - start) % MULTIPLE
        filled += [order[start:stop], order.new_zeros(padding)]
        flags += [torch.zeros(stop - start, dtype=torch.bool), torch.ones(padding, dtype=torch.bool)]
    return torch.cat(filled), torch.cat(flags)
