# SPDX-License-Identifier: Apache-2.0
"""Tile configs of `mizzen.kernels.gemm.packed_swap_ab` by weight and batch, measured on an H200."""

from __future__ import annotations

TileNumbers = tuple[int, int, int, int]
"""Fields of a `PackedTileConfig`: weight rows per block, k-splits, blocks sharing x, blocks per SM."""
SM_COUNT = 132
"""Number of SMs of the H200 on which shapes were measured."""
GPC_SIZES = (18, 18, 18, 18, 16, 16, 14, 14)
"""SMs by GPC. A cluster occupies SMs of a single GPC; these sizes explain which grids ran in one wave."""
MAX_BLOCK_BATCH = 128
"""Maximum number of rows of x that a block multiplies; more rows are divided among blocks."""
MAX_SHARED_BATCH = 64
"""Largest number of rows of x per block at which two blocks per SM have enough pipeline stages."""
LONE_WARPGROUP_FACTOR = 1.55
"""Time per weight row of a warpgroup that is alone on its SM, relative to two or three warpgroups."""
MAX_SPLIT_K = 6
"""Maximum number of k-splits of a default tile config; more were never faster."""
MIN_SPLIT_COLUMNS = 512
"""Smallest number of columns of a k-split."""

TILE_CONFIGS: dict[tuple[int, int, int], dict[int, TileNumbers]] = {
    (4, 4096, 4096): {
        16: (128, 6, 1, 2),
        64: (64, 3, 1, 2),
        96: (128, 3, 1, 1),
        128: (64, 3, 2, 2),
        256: (128, 2, 1, 1),
    },
    (4, 4096, 12288): {32: (128, 6, 1, 2), 96: (128, 3, 1, 1), 128: (192, 5, 1, 1), 256: (128, 2, 1, 1)},
    (4, 6144, 4096): {64: (64, 2, 1, 2), 128: (128, 2, 1, 1), 256: (192, 2, 1, 1)},
    (4, 24576, 4096): {256: (192, 1, 1, 1)},
    (8, 4096, 4096): {
        16: (64, 3, 1, 2),
        32: (128, 6, 1, 2),
        64: (64, 3, 1, 2),
        96: (64, 3, 2, 2),
        128: (128, 3, 1, 1),
        256: (128, 2, 1, 1),
    },
    (8, 4096, 12288): {
        32: (128, 6, 1, 2),
        64: (64, 3, 1, 2),
        96: (192, 5, 1, 1),
        128: (128, 3, 1, 1),
        256: (128, 2, 1, 1),
    },
    (8, 6144, 4096): {32: (128, 4, 1, 2), 64: (64, 2, 1, 2), 128: (128, 2, 1, 1), 256: (192, 2, 1, 1)},
    (8, 24576, 4096): {256: (192, 1, 1, 1)},
}
"""Tile configs: for each (bits of a code, rows, columns), a mapping from batch size to tile config.

A batch uses the config of the smallest listed batch that is no smaller. At up to 128 rows of x, tiles that
multiply the scales of groups into the weights were chosen only where they were faster by more than 3 %.
"""


def find_tile_numbers(bits: int, rows: int, columns: int, batch: int) -> TileNumbers:
    """Return the tile config for a weight [rows, columns] and a padded batch of `batch` rows of x.

    It is the measured config of the next larger measured batch if there is one, and otherwise the default.
    """
    configs = TILE_CONFIGS.get((bits, rows, columns), {})
    larger = [size for size in configs if size >= batch]
    return configs[min(larger)] if larger else default_tile_numbers(rows, columns, batch)


def default_tile_numbers(rows: int, columns: int, batch: int) -> TileNumbers:
    """Return the tile config for an unmeasured shape: the one with the lowest `estimate_time`.

    For the measured shapes, its times are 7 % above the shortest on average.
    """
    batch_blocks = -(-batch // MAX_BLOCK_BATCH)
    blocks_per_sm = (1, 2) if batch // batch_blocks <= MAX_SHARED_BATCH else (1,)
    splits = range(1, max(1, min(MAX_SPLIT_K, columns // MIN_SPLIT_COLUMNS)) + 1)
    choices = [
        (height, split_k, 1, blocks)
        for blocks in blocks_per_sm
        for height in ((64, 128) if blocks == 2 else (64, 128, 192))
        for split_k in splits
    ]
    return min(choices, key=lambda numbers: estimate_time(rows, columns, batch, numbers))


def estimate_time(rows: int, columns: int, batch: int, numbers: TileNumbers) -> float:
    """Estimate the time of a product in microseconds; only its order among tile configs matters.

    An SM takes about the same time for a weight row in all tiles, but longer if it runs a single warpgroup of
    64 rows. The estimate is therefore the number of rows and columns that the busiest SM multiplies, with
    allowances for waves of blocks and for k-splits.
    """
    height, split_k, _, blocks_per_sm = numbers
    batch_blocks = -(-batch // MAX_BLOCK_BATCH)
    slots = sum(size * blocks_per_sm // split_k for size in GPC_SIZES) * split_k
    full_waves, rest = divmod(-(-rows // height) * batch_blocks * split_k, slots)
    blocks_on_sm = full_waves * blocks_per_sm + min(blocks_per_sm, -(-rest // SM_COUNT))
    block_batch = batch / batch_blocks
    row_columns = blocks_on_sm * height * columns / split_k
    if height == 64 and blocks_per_sm == 1:
        row_columns *= LONE_WARPGROUP_FACTOR
    split_time = 0.5 + 0.004 * block_batch if split_k > 1 else 0.0
    return row_columns * (2.1e-5 + 2e-7 * block_batch) + full_waves + split_time
