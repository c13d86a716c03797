# SPDX-License-Identifier: Apache-2.0
"""Tilings of `mizzen.kernels.gemm.w8a8_swap_ab` by weight shape and batch, measured on an H200."""

from __future__ import annotations

TileNumbers = tuple[int, int, int, int]
"""Fields of a `W8A8Tile`: warpgroups, k-splits, blocks that load x together, blocks per SM."""

MEASURED_BATCH_SIZES = (8, 32, 64, 128, 256)
"""Batch sizes at which shapes were measured; other batches use the tiling of the next larger one."""

ONE_WAVE: dict[int, TileNumbers] = dict.fromkeys((8, 32, 64, 128, 256), (1, 2, 1, 1))
TILES: dict[tuple[int, int], dict[int, TileNumbers]] = {
    (4096, 4096): ONE_WAVE | {8: (1, 4, 1, 2)},
    (4096, 12288): ONE_WAVE,
    (6144, 4096): {
        8: (1, 1, 1, 1),
        32: (1, 1, 1, 1),
        64: (1, 2, 1, 2),
        128: (1, 2, 1, 2),
        256: (2, 2, 2, 1),
    },
    (24576, 4096): {
        8: (3, 1, 1, 1),
        32: (3, 1, 1, 1),
        64: (1, 1, 1, 3),
        128: (3, 1, 1, 1),
        256: (2, 1, 1, 1),
    },
}
"""Measured tilings by (rows, columns) and batch size."""

DEFAULT_TILES: tuple[TileNumbers, ...] = (
    (1, 1, 1, 1),
    (1, 1, 1, 2),
    (1, 2, 1, 1),
    (1, 2, 1, 2),
    (1, 4, 1, 1),
    (1, 4, 1, 2),
    (2, 1, 1, 1),
    (2, 2, 1, 1),
    (2, 4, 1, 1),
    (2, 1, 2, 1),
    (2, 2, 2, 1),
    (2, 4, 2, 1),
    (3, 1, 1, 1),
)
"""Tilings from which that of an unmeasured shape is chosen."""
