# SPDX-License-Identifier: Apache-2.0
"""Swap-AB GEMM over packed quantized weights, for batches that are too large for `packed_small`.

As in `mizzen.kernels.gemm.swap_ab`, weight rows are the wgmma M dimension and rows of x its N dimension. The
weights are read in the fragment layout and become bfloat16 in registers, which are the A operand of wgmma, so
that memory and shared memory only hold codes. x stays bfloat16.

Scales of groups multiply the sums of the groups in float32. Only if the registers of a tile cannot hold two
sets of sums do they multiply the weights, which are then rounded to bfloat16: the relative error of a weight
is at most 2^-9, and up to 2^-8 if the scales are not bfloat16, because they are rounded, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mizzen.kernels.gemm.fragments import STRIP_ROWS, PackedWeight, ScaleLayout, chunk_columns
from mizzen.kernels.gemm.hopper import (
    ALIGNMENT,
    MAX_SHARED_BYTES,
    make_tensor_map,
    register_wgmma_source,
)
from mizzen.kernels.gemm.packed_tile_configs import MAX_BLOCK_BATCH, find_tile_numbers
from mizzen.kernels.nvrtc import KernelSpec, launch, load_kernel, read_source
from mizzen.layers.quantized.canonical import Codes

STAGE_COLUMNS = 128
"""Number of columns per pipeline stage."""
CHUNK_BYTES = 2048
"""Bytes of the codes of a chunk of a strip; see `fragments`."""
BATCH_MULTIPLE = 16
"""The kernel is compiled for multiples of this number of rows of x; other batches are padded."""
MAX_BATCH = 256
"""Largest number of rows of x for which the kernel is meant; larger ones work as well."""
MAX_STAGES = 20
"""Maximum number of pipeline stages."""
MAX_CLUSTER_SIZE = 8
"""Number of blocks in the largest cluster that every GPU with clusters supports."""
MAX_EXACT_SUMS = 192 * 96
"""Largest number of sums of a block for which its registers hold a second set for groups."""
CODE_NUMBERS = {Codes.UINT4: 0, Codes.INT8: 1, Codes.E4M3: 2}
"""Numbers of the codes in the kernel's source."""
SCALE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the scales' dtypes in the kernel's source."""
TO_ROWS, TO_SUMS, TO_WEIGHTS = 0, 1, 2
"""Values of the macro SCALING of the kernel, which its source describes."""


@dataclass(frozen=True, slots=True)
class PackedTileConfig:
    """Tiling of a swap-AB GEMM over packed weights."""

    rows: int
    """Weight rows per block: 64, 128 or 192."""
    split_k: int
    """Number of k-splits: parts of the inner dimension that different blocks multiply."""
    multicast: int
    """Number of blocks that load x together by TMA multicast."""
    blocks_per_sm: int = 1
    """Number of blocks that fit on an SM; 2 for at most 128 rows."""


@dataclass(frozen=True, slots=True)
class WeightTraits:
    """Properties of a packed weight for which kernels are compiled."""

    codes: Codes
    columns: int
    """Number of columns with padding."""
    group_columns: int
    """Columns that share a scale or zero point; a multiple of 128 of at least `columns` if all do."""
    scale_layout: ScaleLayout
    scale_dtype: torch.dtype
    has_zeros: bool

    @property
    def groups(self) -> int:
        """Number of groups of columns."""
        return -(-self.columns // self.group_columns)

    @property
    def steps(self) -> int:
        """Number of pipeline stages of a weight row."""
        return -(-self.columns // STAGE_COLUMNS)

    @property
    def granule(self) -> int:
        """Largest number of columns, up to a stage's, that share a scale at every multiple of it."""
        return next(size for size in (128, 64, 32) if self.group_columns % size == 0)

    def strip_bytes(self) -> int:
        """Return the shared memory of a stage for a strip: codes, scales and zero points."""
        codes = STAGE_COLUMNS // chunk_columns(self.codes) * CHUNK_BYTES
        entries = 0 if self.scale_layout is ScaleLayout.ROW else self.scale_rows
        groups = STAGE_COLUMNS // self.granule
        return codes + groups * (entries * self.scale_dtype.itemsize + STRIP_ROWS * self.has_zeros)

    @property
    def scale_rows(self) -> int:
        """Number of scales of a strip and group."""
        return 8 if self.scale_layout is ScaleLayout.OCTET else STRIP_ROWS


@dataclass(frozen=True, slots=True)
class BatchBlocks:
    """Division of the rows of x among blocks."""

    batch: int
    """Rows of x per block, with padding."""
    blocks: int


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Everything that determines a kernel, its grid and its shared memory."""

    traits: WeightTraits
    config: PackedTileConfig
    batch: BatchBlocks

    @property
    def stages(self) -> int:
        """Number of pipeline stages that fit in shared memory."""
        available = MAX_SHARED_BYTES // self.config.blocks_per_sm - ALIGNMENT - 512
        steps = -(-self.traits.steps // self.config.split_k)
        return min(available // self.stage_bytes, max(2, steps), MAX_STAGES)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        inputs = self.batch.batch * STAGE_COLUMNS * 2
        return inputs + self.config.rows // STRIP_ROWS * self.traits.strip_bytes()

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        rows, batch, split_k = self.config.rows, self.batch.batch, self.config.split_k
        staging = -(-batch // 8 // split_k) * 8 * (rows + 8) * 2
        sums = rows * batch * 4 if split_k > 1 else 0
        return max(self.stages * self.stage_bytes, sums + staging) + ALIGNMENT

    @property
    def is_valid(self) -> bool:
        """Whether the tiling suits the weight and the batch."""
        config = self.config
        return (
            self.batch.batch % (8 * config.multicast) == 0
            and config.split_k * config.multicast <= MAX_CLUSTER_SIZE
            and config.split_k <= self.traits.steps
            and not (config.blocks_per_sm == 2 and config.rows * self.batch.batch > 128 * 64)
            and self.stages >= 2
            and self.shared_bytes <= MAX_SHARED_BYTES // config.blocks_per_sm - 512
        )

    @property
    def scaling(self) -> int:
        """Value of the macro SCALING."""
        if self.traits.scale_layout is ScaleLayout.ROW:
            return TO_ROWS
        return TO_SUMS if self.config.rows * self.batch.batch <= self.max_exact_sums else TO_WEIGHTS

    @property
    def max_exact_sums(self) -> int:
        """Largest number of sums of a block for which its registers hold a second set."""
        return MAX_EXACT_SUMS if self.config.blocks_per_sm == 1 or self.config.rows == 64 else 128 * 32

    @property
    def fragments(self) -> int:
        """Number of k-steps that are converted at a time; fewer where registers are short."""
        if self.scaling == TO_ROWS:
            return 4
        is_large = self.scaling == TO_SUMS and self.config.rows * self.batch.batch > 192 * 80
        return 2 if self.traits.granule == 32 or is_large else 4

    def spec(self, *, swiglu: bool, defer_pdl: bool) -> KernelSpec:
        """Return the spec of the kernel."""
        traits, config = self.traits, self.config
        defines = (
            ("BATCH", self.batch.batch),
            ("BATCH_BLOCKS", self.batch.blocks),
            ("TILE_ROWS", config.rows),
            ("SPLIT_K", config.split_k),
            ("MULTICAST", config.multicast),
            ("BLOCKS_PER_SM", config.blocks_per_sm),
            ("STAGES", self.stages),
            ("FRAGMENTS", self.fragments),
            ("COLUMNS", traits.columns),
            ("GROUPS", traits.groups),
            ("GROUP_COLUMNS", traits.group_columns),
            ("CODES", CODE_NUMBERS[traits.codes]),
            ("SCALING", self.scaling),
            ("SCALE_ROWS", traits.scale_rows),
            ("SCALE_TYPE", SCALE_NUMBERS[traits.scale_dtype]),
            ("HAS_ZEROS", int(traits.has_zeros)),
            ("SWIGLU", int(swiglu)),
            ("DEFER_PDL", int(defer_pdl)),
        )
        return kernel_source(self.batch.batch, self.fragments), "packed_swap_ab", defines


@functools.cache
def kernel_source(batch: int, fragments: int) -> str:
    """Return the complete source of the kernel for `batch` rows of x per block."""
    return (
        "typedef unsigned long long u64;\n"
        + register_wgmma_source(batch, fragments)
        + read_source("bf16")
        + read_source("gemm/hopper")
        + read_source("gemm/fragments")
        + read_source("gemm/packed_swap_ab")
    )


def find_traits(weight: PackedWeight) -> WeightTraits:
    """Return the properties of a packed weight for which kernels are compiled."""
    group_columns = weight.group_columns
    if weight.groups == 1:
        group_columns = -(-weight.padded_columns // STAGE_COLUMNS) * STAGE_COLUMNS
    return WeightTraits(
        codes=weight.codes,
        columns=weight.padded_columns,
        group_columns=group_columns,
        scale_layout=weight.scale_layout,
        scale_dtype=weight.scales.dtype,
        has_zeros=weight.zeros is not None,
    )


def divide_batch(count: int) -> BatchBlocks:
    """Return how `count` rows of x are divided among blocks."""
    blocks = -(-count // MAX_BLOCK_BATCH)
    return BatchBlocks(-(-count // (blocks * BATCH_MULTIPLE)) * BATCH_MULTIPLE, blocks)


@functools.lru_cache(4096)
def plan_kernel(traits: WeightTraits, rows: int, count: int, config: PackedTileConfig | None) -> KernelPlan:
    """Return the kernel for a weight of `rows` rows and `count` rows of x.

    Raises:
        ValueError: `config` does not suit the weight and the batch.
    """
    batch = divide_batch(count)
    if config is not None:
        plan = KernelPlan(traits, config, batch)
        if not plan.is_valid:
            raise ValueError(f"{config} does not suit {traits} and {batch}; use another tile config")
        return plan
    bits = 4 if traits.codes is Codes.UINT4 else 8
    numbers = find_tile_numbers(bits, rows, traits.columns, batch.batch * batch.blocks)
    # A weight of few columns, or with many scales, may not suit the config of its shape.
    for candidate in (numbers, (numbers[0], 1, 1, 1), (64, 1, 1, 1)):
        plan = KernelPlan(traits, PackedTileConfig(*candidate), batch)
        if plan.is_valid:
            return plan
    raise ValueError(f"no tile config suits {traits} and {batch}; dequantize the weight instead")


def supports(weight: PackedWeight) -> bool:
    """Return whether the kernel can multiply a weight.

    Rows must be a multiple of 8 (of 16 with SwiGLU), columns of 8; groups 32 or a multiple of 64 columns.
    """
    if weight.rows % (16 if weight.swiglu else 8) or weight.columns % 8:
        return False
    return weight.groups == 1 or weight.group_columns == 32 or weight.group_columns % 64 == 0


def max_batch(weight: PackedWeight) -> int:
    """Return the largest number of rows of x for which the kernel is meant; 0 for unsupported weights."""
    return MAX_BATCH if supports(weight) else 0


def kernel_specs(
    weight: PackedWeight, batch_sizes: Iterable[int], *, defer_pdl: bool = False
) -> set[KernelSpec]:
    """Return the specs of the kernels for a weight and batches of `batch_sizes` rows."""
    traits = find_traits(weight)
    plans = {plan_kernel(traits, weight.rows, size, None) for size in batch_sizes}
    return {plan.spec(swiglu=weight.swiglu, defer_pdl=defer_pdl) for plan in plans}


def packed_swap_ab_gemm(
    weight: PackedWeight,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    swiglu: bool = False,
    defer_pdl: bool = False,
    config: PackedTileConfig | None = None,
) -> torch.Tensor:
    """Return x times the transpose of the weight, bfloat16 [batch, rows].

    Args:
        weight: Packed weight. With `order`, the columns of x must already be in that order.
        x: Input rows, bfloat16 [batch, columns], contiguous.
        out: Tensor for the result; by default a new one.
        swiglu: Whether to return silu(gate) * up, [batch, rows / 2], of a weight packed for it.
        defer_pdl: Whether the next kernel may start only when this one has ended, instead of at once.
        config: Tiling; by default the measured or default one.

    Raises:
        ValueError: the kernel does not support the weight, or `swiglu` or the shape of x does not fit it, or
            `config` does not.
    """
    if not supports(weight):
        raise ValueError(
            f"{weight.rows} rows, {weight.columns} columns and groups of {weight.group_columns} columns are "
            "not supported together; dequantize the weight instead"
        )
    if swiglu != weight.swiglu:
        raise ValueError(f"the weight was packed with swiglu={weight.swiglu}; pack it again to change that")
    if x.shape[1] != weight.columns:
        raise ValueError(f"x has {x.shape[1]} columns, but the weight has {weight.columns}")
    plan = plan_kernel(find_traits(weight), weight.rows, len(x), config)
    outputs = weight.rows // (1 + swiglu)
    if out is None:
        out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    function = load_kernel(*plan.spec(swiglu=swiglu, defer_pdl=defer_pdl), x.device.index or 0)
    tile, batch = plan.config, plan.batch
    box = (STAGE_COLUMNS // 2, batch.batch // tile.multicast)
    input_map = make_tensor_map(x.data_ptr(), (weight.columns, len(x)), (weight.columns,), box)
    tiles = -(-weight.strips * STRIP_ROWS // tile.rows)
    tiles = -(-tiles // tile.multicast) * tile.multicast
    launch(
        function,
        (tiles * batch.blocks, tile.split_k, 1),
        tile.rows * 2 + 128,
        (input_map, weight.values, weight.scales, weight.zeros, out, weight.strips, outputs, len(x)),
        cluster=(tile.multicast, tile.split_k, 1),
        shared_bytes=plan.shared_bytes,
    )
    return out
