# SPDX-License-Identifier: Apache-2.0
"""Tilings of `mizzen.kernels.gemm.packed_small`, and their selection by weight and batch."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import torch

from mizzen.kernels.gemm.fragments import STRIP_ROWS, ScaleLayout, chunk_columns
from mizzen.kernels.gemm.hopper import MAX_SHARED_BYTES
from mizzen.layers.quantized.canonical import Codes

TILE_INPUTS = 8
"""Rows of x in an N tile of the MMA."""
SM_COUNT = 132
"""Number of SMs of the H200 on which shapes were measured."""
RESERVED_BYTES = 1024
"""Shared memory that the driver reserves in every block."""
SUM_PADDING = 4
"""Floats between the sums of two rows of x in shared memory, besides those of all weight rows of a unit."""
TILE_ROWS = 16
"""Weight rows of a tile."""
REGISTERS = 65536
"""Registers of an SM."""
MAX_REGISTERS = 255
"""Most registers of a thread."""
SUM_REGISTERS = 4
"""Registers of a thread that hold sums of a warp for 16 weight rows and one N tile."""
BASE_REGISTERS = 96
"""Registers of a thread besides two such sets of sums, about."""
MAX_SAVED = 4
"""Most units whose sums a warp keeps in registers."""
MAX_SLOTS = 8
"""Most slots of a ring."""
MAX_STEPS = 64
"""Most steps in which the warps of a block multiply its columns; it is also in the kernel's source."""
BARRIER_BYTES = 1024
"""Most bytes of the barriers of a block, which are not in its dynamic shared memory."""
CHUNK_BYTES = 512
"""Bytes of the codes of a tile in a chunk."""
MAX_UNSPLIT_COLUMNS = 8192
"""Number of columns beyond which k-splits were measured to be faster."""
SHAPES_OF_SLOTS = ((4, 8), (2, 8), (4, 4), (2, 4), (1, 8), (1, 4))
"""Chunks per warp and warps of tilings to try; more columns in a slot are faster if three slots fit."""
MIN_STRIPS = 48
"""Fewest strips that a block computes as a whole; if there are fewer, blocks compute halves of strips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFormat:
    """Properties of a packed weight on which its kernel depends."""

    codes: Codes
    strips: int
    columns: int
    """Columns with padding."""
    layout: ScaleLayout
    dtype: torch.dtype
    """Type of the scales."""
    has_zeros: bool
    group_columns: int
    """Columns that share a scale; 0 if all do."""
    swiglu: bool


@dataclass(frozen=True, slots=True)
class SmallTileConfig:
    """Tiling of a GEMM over packed weights."""

    tiles: int
    """Tiles of 16 weight rows in a unit, the rows that a block computes at a time: 1, 2 or 4."""
    units: int
    """Units that a cluster of blocks computes, at most."""
    split_k: int
    """Number of k-splits: blocks of a cluster that divide the columns; a power of two up to `tiles`."""
    warps: int
    """Warps per block, which divide the columns of the block."""
    slots: int
    """Slots of the ring."""
    chunks: int
    """Chunks of codes of a warp in a slot, of 512 bytes for each tile."""
    blocks_per_sm: int = 1
    """Number of blocks that fit on an SM; if two, one may belong to the next kernel and prefetch weights."""

    def stage_columns(self, weight: PackedFormat) -> int:
        """Return the number of columns whose codes a warp finds in a slot."""
        return self.chunks * chunk_columns(weight.codes)

    def steps(self, weight: PackedFormat) -> int:
        """Return the number of steps in which the warps of a block multiply the columns of a unit."""
        return -(-weight.columns // (self.stage_columns(weight) * self.split_k * self.warps))

    def saved(self, count: int) -> int:
        """Return the number of strips whose sums a warp keeps in registers before they are added up."""
        sums = -(-count // TILE_INPUTS) * self.tiles * SUM_REGISTERS
        available = min(REGISTERS // (32 * self.warps * self.blocks_per_sm) // 8 * 8, MAX_REGISTERS)
        return max(1, min(self.units, MAX_SAVED, (available - BASE_REGISTERS - 2 * sums) // sums))

    def slot_bytes(self, weight: PackedFormat) -> int:
        """Return the bytes of a slot of the ring: codes, scales and zero points."""
        columns = self.warps * self.stage_columns(weight)
        groups = -(-columns // weight.group_columns) + 1 if weight.group_columns else 1
        scales = {ScaleLayout.ROW: 0, ScaleLayout.OCTET: 32}.get(weight.layout, 64 * weight.dtype.itemsize)
        zeros = 64 if weight.has_zeros else 0
        return (
            -(-(self.warps * self.chunks * self.tiles * CHUNK_BYTES + groups * (scales + zeros)) // 128) * 128
        )

    def shared_layout(self, weight: PackedFormat, count: int) -> tuple[int, int]:
        """Return the dynamic shared memory of a block in bytes, and the offset of the sums of its warps.

        The sums overlap the ring if they are first written when it is no longer used. `count` is the number
        of rows of x.
        """
        ring = self.slots * self.slot_bytes(weight)
        columns = self.stage_columns(weight)
        pitch = -(-weight.columns // columns // self.split_k) * columns * 2 + 16
        rows = self.tiles * TILE_ROWS
        row_scales = self.units * rows * 4 if weight.layout is ScaleLayout.ROW else 0
        cluster_sums = self.units * count * rows * 4 if self.split_k > 1 else 0
        end = ring + count * pitch + row_scales + cluster_sums
        sums = self.warps * count * (rows + SUM_PADDING) * 4
        return (end, 0) if self.units <= self.saved(count) and sums <= ring else (end + sums, end)

    def supports(self, weight: PackedFormat, count: int) -> bool:
        """Return whether this tiling is valid for a weight and `count` rows of x."""
        columns = self.stage_columns(weight)
        group = weight.group_columns or weight.columns
        limit = (MAX_SHARED_BYTES + RESERVED_BYTES) // self.blocks_per_sm - RESERVED_BYTES
        return (
            self.slots >= min(2, self.units * self.steps(weight))
            and weight.columns % columns == 0
            and (group % columns == 0 or columns % group == 0)
            and weight.columns // columns >= self.split_k
            and self.steps(weight) <= MAX_STEPS
            and self.split_k <= self.tiles
            and self.shared_layout(weight, count)[0] + BARRIER_BYTES <= limit
        )


TILE_CONFIGS = {
    (Codes.UINT4, 6144, 4096, 1): SmallTileConfig(2, 1, 1, 8, 1, 8, 2),
    (Codes.UINT4, 4096, 4096, 1): SmallTileConfig(2, 1, 1, 4, 2, 8),
    (Codes.UINT4, 24576, 4096, 1): SmallTileConfig(4, 2, 1, 8, 3, 2, 2),
    (Codes.UINT4, 4096, 12288, 1): SmallTileConfig(4, 1, 2, 8, 2, 4),
    (Codes.UINT4, 4096, 4096, 8): SmallTileConfig(2, 1, 1, 8, 2, 4),
    (Codes.UINT4, 24576, 4096, 8): SmallTileConfig(4, 3, 1, 4, 4, 4),
    (Codes.E4M3, 24576, 4096, 8): SmallTileConfig(4, 3, 1, 4, 5, 4),
    (Codes.E4M3, 6144, 4096, 16): SmallTileConfig(4, 2, 2, 8, 4, 2),
    (Codes.UINT4, 6144, 4096, 16): SmallTileConfig(4, 1, 1, 8, 2, 2),
}
"""Tilings that were measured to be faster than those of the rules, by codes, rows, columns and batch (1, 8 or
16).

Those of one row were measured in whole layers on an H100, the others alone on an H200.
"""


@functools.lru_cache(4096)
def select_tile_config(weight: PackedFormat, count: int) -> SmallTileConfig | None:
    """Return the tiling for a weight and `count` rows of x; None if no tiling supports them.

    It is the measured one if there is one, and otherwise follows from rules that the measurements suggest.
    Batches of 2 to 8 rows have the same tiling, and so have those of 9 to 16 rows.
    """
    batch = 1 if count == 1 else -(-count // TILE_INPUTS) * TILE_INPUTS
    measured = TILE_CONFIGS.get((weight.codes, weight.strips * STRIP_ROWS, weight.columns, batch))
    if measured is not None and measured.supports(weight, batch):
        return measured
    for tiles in (4,) if weight.strips >= MIN_STRIPS else (2, 4):
        units = weight.strips * STRIP_ROWS // (tiles * TILE_ROWS)
        for split_k, (chunks, warps) in itertools.product(_split_ks(weight, batch), SHAPES_OF_SLOTS):
            config = SmallTileConfig(tiles, -(-units * split_k // SM_COUNT), split_k, warps, 1, chunks)
            # Wide slots are slower if the weight is large and its codes have 8 bits.
            if config.units > 1 and weight.codes is not Codes.UINT4 and (chunks, warps) == SHAPES_OF_SLOTS[0]:
                continue
            config = _fill_shared_memory(weight, config, batch)
            if config is not None:
                return config
    return None


def _fill_shared_memory(weight: PackedFormat, config: SmallTileConfig, batch: int) -> SmallTileConfig | None:
    """Return the tiling with as many slots as fit; None if fewer than three fit, unless fewer are needed."""
    needed = min(config.units * config.steps(weight), MAX_SLOTS)
    numbers = range(needed, min(3, needed) - 1, -1)
    candidates = (replace(config, slots=slots) for slots in numbers)
    return next((candidate for candidate in candidates if candidate.supports(weight, batch)), None)


def _split_ks(weight: PackedFormat, batch: int) -> tuple[int, ...]:
    """Return the numbers of k-splits to try, the preferred one first.

    With several k-splits, blocks need less shared memory for x, and few rows fill the SMs; but adding up the
    sums of a cluster takes time.
    """
    few_rows = batch > 1 and weight.strips <= SM_COUNT // 2
    return (2, 4, 1) if weight.columns > MAX_UNSPLIT_COLUMNS or few_rows else (1, 2, 4)
