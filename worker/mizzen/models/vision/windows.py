# SPDX-License-Identifier: Apache-2.0
"""Windows of attention."""

from __future__ import annotations

import torch

from mizzen.attention.segments import Segments


def order_by_window(
    rows: int, columns: int, window: int, merge: int, device: torch.device
) -> tuple[torch.Tensor, Segments]:
    """Order the blocks of an image by windows, so that windows of equal size follow each other.

    Only windows at the right and lower edges are smaller than `window` x `window`, so that there are at most
    four sizes.

    Args:
        rows: Number of rows of blocks.
        columns: Number of columns of blocks.
        window: Height and width of a window in blocks.
        merge: Height and width of a block in patches.
        device: Device of the order.

    Returns:
        The index of the block at each place of the new order, int64 [rows * columns], and the
        segments of patches that attend to each other.
    """
    index = torch.arange(rows * columns, device=device).view(rows, columns)
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
