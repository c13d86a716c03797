# SPDX-License-Identifier: Apache-2.0
"""Windows of attention, and attention within segments of a sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Segments = tuple[tuple[int, int], ...]
"""Pairs (count, length) of consecutive segments of equal length, which together cover a sequence."""


def order_by_window(rows: int, columns: int, window: int, merge: int) -> tuple[torch.Tensor, Segments]:
    """Order the blocks of an image by windows, so that windows of equal size follow each other.

    Only windows at the right and lower edges are smaller than `window` x `window`, so that there are at most
    four sizes.

    Args:
        rows: Number of rows of blocks.
        columns: Number of columns of blocks.
        window: Height and width of a window in blocks.
        merge: Height and width of a block in patches.

    Returns:
        The index of the block at each place of the new order, int64 [rows * columns] on the CPU, and the
        segments of patches that attend to each other.
    """
    index = torch.arange(rows * columns).view(rows, columns)
    full_rows, full_columns = rows - rows % window, columns - columns % window
    parts, segments = [], []
    for part in (
        index[:full_rows, :full_columns],
        index[:full_rows, full_columns:],
        index[full_rows:, :full_columns],
        index[full_rows:, full_columns:],
    ):
        if not part.numel():
            continue
        height, width = min(window, part.shape[0]), min(window, part.shape[1])
        windows = part.reshape(part.shape[0] // height, height, part.shape[1] // width, width)
        parts.append(windows.transpose(1, 2).flatten())
        segments.append((part.numel() // (height * width), height * width * merge * merge))
    return torch.cat(parts), tuple(segments)


def attend_in_segments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Compute attention of each segment to itself; all of a pair in `segments` are one batch.

    Args:
        q: Queries [tokens, heads, head_dim].
        k: Keys, of the same shape.
        v: Values, of the same shape.
        segments: Segments of the tokens.

    Returns:
        The attention's output [tokens, heads * head_dim].
    """
    outputs, start = [], 0
    for count, length in segments:
        rows = slice(start, start + count * length)
        start = rows.stop
        query, key, value = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(query, key, value)
        outputs.append(attended.transpose(1, 2).reshape(count * length, -1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
