# SPDX-License-Identifier: Apache-2.0
"""Swap-AB GEMM of weights and inputs in 8 bits (W8A8) for M <= 256, for decode batches.

The pipeline is that of `mizzen.kernels.gemm.swap_ab`. Both operands are row-major E4M3 or INT8, so prompts
can use the same weights with a library GEMM. E4M3 products of 128 columns are summed by the tensor cores, and
these sums are added in float32; INT8 sums are exact. See `w8a8_swap_ab.cu`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mizzen.kernels.gemm.hopper import (
    ALIGNMENT,
    MAX_SHARED_BYTES,
    ROW_BYTES,
    make_tensor_map,
    make_weight_map,
)
from mizzen.kernels.gemm.w8a8_tiles import DEFAULT_TILES, MEASURED_BATCH_SIZES, TILES
from mizzen.kernels.nvrtc import KernelSpec, launch, load_kernel, read_source

STAGE_COLUMNS = ROW_BYTES
"""Number of columns per pipeline stage, and of columns that share a scale if not all do."""
MAX_BATCH = 256
"""Maximum number of rows of x."""
BATCH_SIZES = (8, *range(16, 129, 16), *range(160, MAX_BATCH + 1, 32))
"""Numbers of rows of x for which the kernel is compiled; other batches are padded to a larger number."""
MAX_CLUSTER_SIZE = 8
"""Number of blocks in the largest cluster that every GPU with clusters supports."""
REGISTERS = 1 << 16
"""Registers of an SM."""
OTHER_REGISTERS = 40
"""Registers of a consumer thread besides its sums."""
PRODUCER_REGISTERS = 40
"""Registers of a thread of the producer warpgroup."""


@dataclass(frozen=True, slots=True)
class W8A8Tile:
    """Tiling of a W8A8 swap-AB GEMM."""

    warpgroups: int
    """Number of 64 weight rows per block, 1 to 3."""
    split_k: int
    """Number of k-splits: parts of the inner dimension that different blocks multiply."""
    multicast: int
    """Number of blocks that load x together by TMA multicast."""
    blocks_per_sm: int = 1
    """Number of blocks that fit on an SM."""

    @property
    def rows(self) -> int:
        """Weight rows per block."""
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.warpgroups + (32 if self.warpgroups == 1 else 128)

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer thread."""
        launched = REGISTERS // (self.blocks_per_sm * self.threads) // 8 * 8
        if self.warpgroups == 1:
            return min(launched, 255)
        free = launched * self.threads - 128 * PRODUCER_REGISTERS
        return min(free // (128 * self.warpgroups) // 8 * 8, 232)

    def stage_bytes(self, batch: int, grouped: bool) -> int:
        """Return the bytes of a pipeline stage for `batch` rows of x; `grouped` stages hold scales, too."""
        return (self.rows + batch) * ROW_BYTES + (ALIGNMENT if grouped else 0)

    def stages(self, batch: int, steps: int, grouped: bool) -> int:
        """Return the number of pipeline stages that fit in shared memory; 0 if fewer than two fit.

        `batch` is the number of rows of x; `steps` is the number of stages of the shortest k-split.
        """
        free = MAX_SHARED_BYTES // self.blocks_per_sm - 1024 - ALIGNMENT - 512
        fitting = free // self.stage_bytes(batch, grouped)
        return 0 if fitting < 2 else min(fitting, max(steps, 2), 16)

    def shared_bytes(self, batch: int, steps: int, grouped: bool) -> int:
        """Return the dynamic shared memory of a block in bytes; for parameters see `stages`."""
        pipeline = self.stages(batch, steps, grouped) * self.stage_bytes(batch, grouped)
        staging = -(-batch // 8 // self.split_k) * 8 * (self.rows + 8) * 2
        sums = self.rows * batch * 4 if self.split_k > 1 else 0
        return max(pipeline, sums + staging) + ALIGNMENT

    def parts(self, batch: int) -> int:
        """Return the number of parts of `batch` rows of x that instructions multiply one after another.

        E4M3 needs registers for the sums of a part besides all sums.
        """
        free = self.consumer_registers - OTHER_REGISTERS - batch // 2
        return -(-batch // 2 // free) if free > 0 else batch

    def supports(self, columns: int, batch: int, grouped: bool) -> bool:
        """Return whether this tiling is valid for a weight of `columns` columns and `batch` rows of x."""
        steps = -(-columns // STAGE_COLUMNS) // self.split_k
        return (
            steps >= 1
            and batch % (8 * self.multicast) == 0
            and self.split_k * self.multicast <= MAX_CLUSTER_SIZE
            and self.stages(batch, steps, grouped) >= 2
            and self.shared_bytes(batch, steps, grouped) <= MAX_SHARED_BYTES // self.blocks_per_sm - 1024
            and self.parts(batch) <= 2
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class W8A8Weight:
    """Weight of a W8A8 product; for its meaning see `mizzen.layers.quantized.canonical.QuantizedWeight`."""

    values: torch.Tensor
    """float8_e4m3fn or int8 [rows, columns], contiguous."""
    scales: torch.Tensor
    """float32 [ceil(rows / row_step), groups], with one group, or (E4M3) one for each 128 columns."""
    row_step: int = 1
    """Rows that share a scale."""
    bias: torch.Tensor | None = None
    """float32 [rows]; None for none."""

    @property
    def grouped(self) -> bool:
        """Whether each 128 columns have a scale."""
        return self.scales.shape[1] > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedInputs:
    """Inputs in 8 bits: x[t, c] is values[t, c] times the scale of the token, or of the token and group."""

    values: torch.Tensor
    """float8_e4m3fn or int8 [tokens, columns], contiguous."""
    scales: torch.Tensor
    """float32: [tokens]; [1] for one scale of all; or [groups, tokens, padded to a multiple of 4], with a
    scale for each 128 columns."""


def supports(values: torch.Tensor, *, grouped: bool, swiglu: bool = False) -> bool:
    """Return whether the kernel supports a weight `values` [rows, columns] of 8-bit elements.

    `grouped` says whether each 128 columns have a scale, which only E4M3 may have.
    """
    (rows, columns), int8 = values.shape, values.dtype == torch.int8
    if (rows % 16 if swiglu else rows % 8) or columns % 16 or (grouped and int8):
        return False
    return all(pad_batch(rows, columns, batch, grouped, None) is not None for batch in BATCH_SIZES)


@functools.cache
def pad_batch(
    rows: int, columns: int, count: int, grouped: bool, tile: W8A8Tile | None
) -> tuple[int, W8A8Tile] | None:
    """Return the compiled batch size for `count` rows of x, and its tiling (`tile` if given).

    Return None if no size has a supported tiling.
    """
    for batch in BATCH_SIZES:
        if batch >= count:
            for candidate in (tile,) if tile else tile_candidates(rows, columns, batch):
                if candidate.supports(columns, batch, grouped):
                    return batch, candidate
    return None


def tile_candidates(rows: int, columns: int, batch: int) -> Iterable[W8A8Tile]:
    """Return tilings for a weight [rows, columns] and a batch size; the first that fits should be used.

    The measured tiling, if there is one, comes first.
    """
    measured_size = next(size for size in MEASURED_BATCH_SIZES if batch <= size)
    measured = TILES.get((rows, columns), {}).get(measured_size)
    for numbers in (*((measured,) if measured else ()), *default_tiles(rows, columns, batch)):
        yield W8A8Tile(*numbers)


def default_tiles(rows: int, columns: int, batch: int) -> list[tuple[int, int, int, int]]:
    """Return the fields of tilings for an unmeasured shape, the best first.

    The rule aims at one wave of blocks, which are all on the GPU at once, and prefers few blocks per SM.
    """
    steps = -(-columns // STAGE_COLUMNS)
    fitting = []
    for warpgroups, split_k, multicast, blocks_per_sm in DEFAULT_TILES:
        tiles = -(-rows // (64 * warpgroups))
        occupied = tiles * split_k / (132 * blocks_per_sm)
        if split_k <= max(1, steps // 4) and (batch > 64 or multicast == 1):
            fitting.append((occupied > 1, -occupied if occupied <= 1 else occupied, blocks_per_sm, split_k))
            fitting[-1] += ((warpgroups, split_k, multicast, blocks_per_sm),)
    return [entry[-1] for entry in sorted(fitting)]


def wgmma_source(count: int, int8: bool) -> str:
    """Return the source of a function `wgmma` that multiplies 64 weight rows by `count` rows of x.

    The function runs one wgmma instruction, which adds the product of 32 columns to the accumulators `d`; if
    `add` is 0, it overwrites them instead.
    """
    size, kind = count // 2, "r" if int8 else "f"
    registers = ", ".join(f"%{i}" for i in range(size))
    outputs = ", ".join(f'"+{kind}"(d[{i}])' for i in range(size))
    types, signs = ("s32.s8.s8", "") if int8 else ("f32.e4m3.e4m3", ", 1, 1")
    return (
        f"__device__ __forceinline__ void wgmma({'int' if int8 else 'float'}* d, u64 a, u64 b, int add) {{\n"
        f'    asm volatile("{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{size + 2}, 0;\\n"\n'
        f'        "wgmma.mma_async.sync.aligned.m64n{count}k32.{types} "\n'
        f'        "{{{registers}}}, %{size}, %{size + 1}, add{signs};\\n}}"\n'
        f'        : {outputs} : "l"(a), "l"(b), "r"(add));\n}}\n'
    )


@functools.cache
def kernel_source(part: int, int8: bool) -> str:
    """Return the complete source of the kernel whose instructions multiply `part` rows of x."""
    texts = (read_source(name) for name in ("bf16", "gemm/hopper", "gemm/w8a8_swap_ab"))
    return "typedef unsigned long long u64;\n" + wgmma_source(part, int8) + "".join(texts)


def kernel_spec(
    columns: int,
    batch: int,
    tile: W8A8Tile,
    *,
    int8: bool,
    grouped: bool,
    swiglu: bool = False,
    defer_pdl: bool = False,
) -> KernelSpec:
    """Return the spec of the kernel for a compiled batch size and tiling."""
    parts = 1 if int8 else tile.parts(batch)
    steps = -(-columns // STAGE_COLUMNS) // tile.split_k
    defines = (
        ("BATCH", batch),
        ("PART", batch // parts),
        ("PARTS", parts),
        ("WARPGROUPS", tile.warpgroups),
        ("SPLIT_K", tile.split_k),
        ("MULTICAST", tile.multicast),
        ("BLOCKS_PER_SM", tile.blocks_per_sm),
        ("CONSUMER_REGISTERS", tile.consumer_registers),
        ("PRODUCER_REGISTERS", PRODUCER_REGISTERS),
        ("STAGES", tile.stages(batch, steps, grouped)),
        ("INT8", int(int8)),
        ("GROUPED", int(grouped)),
        ("SWIGLU", int(swiglu)),
        ("DEFER_PDL", int(defer_pdl)),
    )
    return kernel_source(batch // parts, int8), "w8a8_swap_ab", defines


def kernel_specs(
    weight: W8A8Weight, batch_sizes: Iterable[int], *, swiglu: bool = False, defer_pdl: bool = False
) -> set[KernelSpec]:
    """Return the specs of the kernels for a weight and these batch sizes; too large ones are ignored."""
    (rows, columns), grouped = weight.values.shape, weight.grouped
    int8 = weight.values.dtype == torch.int8
    padded = {pad_batch(rows, columns, size, grouped, None) for size in batch_sizes if size <= MAX_BATCH}
    return {
        kernel_spec(columns, *found, int8=int8, grouped=grouped, swiglu=swiglu, defer_pdl=defer_pdl)
        for found in padded
        if found is not None
    }


def w8a8_swap_ab_gemm(
    weight: W8A8Weight,
    x: QuantizedInputs,
    out: torch.Tensor | None = None,
    *,
    swiglu: bool = False,
    defer_pdl: bool = False,
    tile: W8A8Tile | None = None,
) -> torch.Tensor:
    """Return x times the transpose of the weight, plus the bias, bfloat16 [batch, rows].

    Args:
        weight: Weight; with `swiglu`, gate rows followed by up rows.
        x: Inputs of the element type of the weight, 1 to 256 rows, with a scale for each 128 columns if and
            only if the weight has them.
        out: Contiguous tensor for the result; by default a new one.
        swiglu: Whether to return silu(gate) * up, [batch, rows / 2].
        defer_pdl: Whether the next kernel may start only when this one has ended; `swap_ab.swap_ab_gemm`
            gives the reason.
        tile: Tiling; by default the measured or default one.

    Raises:
        ValueError: the shape is not supported by `tile`, or by any tiling if there is no `tile`.
    """
    (rows, columns), count, grouped = weight.values.shape, len(x.values), weight.grouped
    found = pad_batch(rows, columns, count, grouped, tile)
    if found is None:
        raise ValueError(f"no tiling supports {rows} x {columns} weights and {count} rows of x: {tile}")
    batch, tile = found
    outputs = rows // (1 + swiglu)
    if out is None:
        out = torch.empty((count, outputs), dtype=torch.bfloat16, device=x.values.device)
    int8 = weight.values.dtype == torch.int8
    spec = kernel_spec(columns, batch, tile, int8=int8, grouped=grouped, swiglu=swiglu, defer_pdl=defer_pdl)
    function = load_kernel(*spec, out.device.index or 0)
    box = (STAGE_COLUMNS, batch // tile.multicast)
    input_map = make_tensor_map(x.values.data_ptr(), (columns, count), (columns,), box, 1)
    weight_map = make_weight_map(weight.values, tile.rows, swiglu=swiglu)
    tiles = -(-rows // tile.rows)
    tiles = -(-tiles // tile.multicast) * tile.multicast
    steps = -(-columns // STAGE_COLUMNS)
    stride = x.scales.stride(0) if grouped else int(len(x.scales) > 1)
    maps, scales = (weight_map, input_map), (weight.scales, x.scales, weight.bias)
    launch(
        function,
        (tiles, tile.split_k, 1),
        tile.threads,
        (*maps, *scales, out, outputs, count, steps, weight.row_step, stride),
        cluster=(tile.multicast, tile.split_k, 1),
        shared_bytes=tile.shared_bytes(batch, steps // tile.split_k, grouped),
    )
    return out
