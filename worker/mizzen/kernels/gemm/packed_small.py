# SPDX-License-Identifier: Apache-2.0
"""GEMM over packed quantized weights for 1 to 16 rows of x, bound by the memory that holds the weights.

Weights are in the fragment layout of `mizzen.kernels.gemm.fragments`, so a lane loads the operands of its
MMAs with 16 bytes at a time, without any shuffles, and converts them exactly. Products are accumulated in
float32 within each group of columns; then the group's scale multiplies the sum. So the result differs from
that of the dequantized weight only by rounding in float32, and does not depend on other rows of x.

Weights stream through a ring in shared memory, which is filled before the kernel waits for the previous one,
as in `mizzen.kernels.gemm.gemv`. See `packed_small.cu`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from mizzen.kernels.gemm.fragments import STRIP_ROWS, PackedWeight, ScaleLayout, chunk_columns
from mizzen.kernels.gemm.hopper import MAX_SHARED_BYTES
from mizzen.kernels.launch import is_hopper_or_later
from mizzen.kernels.nvrtc import KernelSpec, launch, load_kernel, read_source
from mizzen.layers.quantized.canonical import Codes

MAX_BATCH = 16
"""Largest number of rows of x that the kernel supports."""
MAX_BATCH_BY_CODES = {Codes.UINT4: 8, Codes.INT8: 4, Codes.E4M3: 4}
"""Number of rows of x up to which the kernel was measured to be faster than `packed_swap_ab` on an H200.

The times in microseconds, for shapes of Qwen3-8B, are those at 1 and at 8 rows, and that of `packed_swap_ab`
for up to 16 rows, from a separate run:
UINT4 by 128 columns: gate-up 17.6, 19.0, 20.7; down 11.3, 12.2, 14.8; qkv 6.0, 8.2, 8.6; o 5.0, 6.3, 7.0.
E4M3 in blocks: gate-up 25.9, 27.8, 25.2; down 15.0, 17.4, 17.2; qkv 9.2, 11.0, 10.6; o 7.3, 8.2, 8.8.
"""
MAX_BYTES_OF_CODES = 64 << 20
"""Bytes of codes of 8 bits beyond which `packed_swap_ab` was measured to be faster even for one row of x."""
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
CODE_MACROS = {Codes.UINT4: 0, Codes.INT8: 1, Codes.E4M3: 2}
LAYOUT_MACROS = {ScaleLayout.ROW: 0, ScaleLayout.OCTET: 1, ScaleLayout.GROUP: 2}
DTYPE_MACROS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_UNSPLIT_COLUMNS = 8192
"""Number of columns beyond which k-splits were measured to be faster."""
SHAPES_OF_SLOTS = ((4, 8), (2, 8), (4, 4), (2, 4), (1, 8), (1, 4))
"""Chunks per warp and warps of tilings to try; more columns in a slot are faster if three slots fit."""
MIN_STRIPS = 48
"""Fewest strips that a block computes as a whole; if there are fewer, blocks compute halves of strips."""
SOURCE = (
    "typedef unsigned long long u64;\n"
    + read_source("bf16")
    + read_source("gemm/hopper")
    + read_source("gemm/fragments")
    + read_source("gemm/packed_small")
)


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
    (Codes.UINT4, 4096, 4096, 8): SmallTileConfig(2, 1, 1, 8, 2, 4),
    (Codes.UINT4, 24576, 4096, 8): SmallTileConfig(4, 3, 1, 4, 4, 4),
    (Codes.E4M3, 24576, 4096, 8): SmallTileConfig(4, 3, 1, 4, 5, 4),
    (Codes.E4M3, 6144, 4096, 16): SmallTileConfig(4, 2, 2, 8, 4, 2),
    (Codes.UINT4, 6144, 4096, 16): SmallTileConfig(4, 1, 1, 8, 2, 2),
}
"""Tilings that were measured on an H200 to be faster than those of the rules, by codes, rows, columns and
batch (1, 8 or 16)."""


def format_of(weight: PackedWeight) -> PackedFormat:
    """Return the properties of a weight on which its kernel depends."""
    return PackedFormat(
        codes=weight.codes,
        strips=weight.strips,
        columns=weight.padded_columns,
        layout=weight.scale_layout,
        dtype=weight.scales.dtype,
        has_zeros=weight.zeros is not None,
        group_columns=0 if weight.scale_layout is ScaleLayout.ROW else weight.group_columns,
        swiglu=weight.swiglu,
    )


def supports(weight: PackedWeight) -> bool:
    """Return whether the kernel supports a weight; it needs a GPU of the Hopper generation or later.

    Groups must have 32 columns or a multiple of 64, and rows of x must be aligned to 16 bytes. If these are
    long, fewer than `MAX_BATCH` of them may fit in shared memory.
    """
    if not is_hopper_or_later(weight.values.device) or weight.columns % 8:
        return False
    whole_groups = weight.group_columns % 64 == 0 or (weight.group_columns == 32 and weight.columns % 64 == 0)
    if weight.scale_layout is not ScaleLayout.ROW and not whole_groups:
        return False
    return select_tile_config(format_of(weight), 1) is not None


def compile_definitions(
    weight: PackedFormat, config: SmallTileConfig, count: int
) -> tuple[tuple[str, int], ...]:
    """Return the preprocessor definitions for a weight, a tiling and `count` rows of x."""
    return (
        ("CODES", CODE_MACROS[weight.codes]),
        ("SCALE_LAYOUT", LAYOUT_MACROS[weight.layout]),
        ("SCALE_TYPE", DTYPE_MACROS[weight.dtype]),
        ("HAS_ZEROS", int(weight.has_zeros)),
        ("GROUP_COLUMNS", weight.group_columns),
        ("SWIGLU", int(weight.swiglu)),
        ("N_TILES", -(-count // TILE_INPUTS)),
        ("TILES", config.tiles),
        ("SPLIT_K", config.split_k),
        ("WARPS", config.warps),
        ("SLOTS", config.slots),
        ("CHUNKS", config.chunks),
        ("BLOCKS_PER_SM", config.blocks_per_sm),
        ("SAVED", config.saved(count)),
    )


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


def max_batch(weight: PackedWeight) -> int:
    """Return the largest number of rows of x for which the kernel was measured to be fastest.

    For more rows, `mizzen.kernels.gemm.packed_swap_ab` is as fast or faster. The result is 0 if the kernel
    does not support the weight, or is not the fastest for any number of rows.
    """
    if not supports(weight):
        return 0
    largest = MAX_BATCH_BY_CODES[weight.codes]
    if weight.codes is not Codes.UINT4 and weight.values.numel() > MAX_BYTES_OF_CODES:
        largest = 0
    described = format_of(weight)
    return next((count for count in range(largest, 0, -1) if select_tile_config(described, count)), 0)


def kernel_specs(weight: PackedWeight, batch_sizes: Iterable[int]) -> set[KernelSpec]:
    """Return the specs of the kernels for a weight and batches of `batch_sizes` rows, up to `MAX_BATCH`."""
    described = format_of(weight)
    batches = [count for count in batch_sizes if count <= MAX_BATCH]
    configs = {count: select_tile_config(described, count) for count in batches}
    return {
        (SOURCE, "packed_small", compile_definitions(described, config, count))
        for count, config in configs.items()
        if config is not None
    }


def packed_small_gemm(
    weight: PackedWeight,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    swiglu: bool = False,
    config: SmallTileConfig | None = None,
) -> torch.Tensor:
    """Return x times the transpose of a packed weight, bfloat16 [count, rows].

    Args:
        weight: Weight that `supports` accepts.
        x: Input rows, bfloat16 [count, columns] and contiguous, 1 to 16 of them. For a weight with an
            `order`, the columns of x are in that order.
        out: Contiguous tensor for the result; by default a new one.
        swiglu: Whether to return silu(gate) * up, [count, rows / 2]; the weight must be packed for it, and
            a weight that is packed for it supports nothing else.
        config: Tiling; by default that of `select_tile_config`.

    Raises:
        ValueError: the weight is not packed for the value of `swiglu`, or the tiling does not support it.
    """
    if swiglu != weight.swiglu:
        raise ValueError(f"swiglu is {swiglu}, but the weight is packed for {weight.swiglu}; pack it again")
    described, count = format_of(weight), len(x)
    config = config or select_tile_config(described, count)
    if config is None or not config.supports(described, count):
        raise ValueError(f"no tiling supports {described} and {count} rows of x (tiling: {config})")
    outputs = weight.rows // (1 + swiglu)
    if out is None:
        out = torch.empty((count, outputs), dtype=x.dtype, device=x.device)
    definitions = compile_definitions(described, config, count)
    function = load_kernel(SOURCE, "packed_small", definitions, x.device.index or 0)
    units = weight.strips * STRIP_ROWS // (config.tiles * TILE_ROWS)
    clusters = -(-units // config.units)
    few_units, more = divmod(units, clusters)
    stages = weight.padded_columns // config.stage_columns(described)
    shared_bytes, sums_at = config.shared_layout(described, count)
    sizes = (stages, weight.groups, weight.columns, outputs, count, few_units, more, config.units, sums_at)
    launch(
        function,
        clusters * config.split_k,
        32 * config.warps,
        (weight.values, weight.scales, weight.zeros, x, out, *sizes),
        cluster=(config.split_k, 1, 1),
        shared_bytes=shared_bytes,
    )
    return out
