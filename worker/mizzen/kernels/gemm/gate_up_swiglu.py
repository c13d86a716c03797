"""Fused gate-up GEMM with SwiGLU for large M, for prefills.

A library writes gate and up to memory, where a SiLU kernel reads them again: 805 MB for 8,192 rows and 24,576
outputs, a twentieth of the GEMM's time. Here one thread accumulates both elements of a pair. The technique is
that of CUTLASS' persistent Hopper kernels; see `gate_up_swiglu.cu`.
"""

from __future__ import annotations

import functools

import torch

from mizzen.kernels.gemm.hopper import (
    ALIGNMENT,
    STAGE_COLUMNS,
    kernel_source,
    make_tensor_map,
    make_weight_map,
)
from mizzen.kernels.nvrtc import KernelSpec, launch, load_kernel

TILE_ROWS = 128
"""Weight rows per block."""
BATCH = 256
"""Rows of x per block."""
CLUSTER_SIZE = 2
"""Blocks of a cluster, which load x together."""
STAGES = 4
TILE_GROUP = 8
"""Pairs of tiles that are multiplied with all rows of x before the next pairs."""
DEFINITIONS = (
    ("BATCH", BATCH),
    ("SWIGLU", 1),
    ("TILE_GROUP", TILE_GROUP),
    ("TILE_ROWS", TILE_ROWS),
    ("CLUSTER_SIZE", CLUSTER_SIZE),
    ("STAGES", STAGES),
)
STAGING_BYTES = 2 * 64 * (TILE_ROWS // 2 + 8) * 2
"""Shared memory through which outputs pass."""
SHARED_BYTES = STAGES * (TILE_ROWS + BATCH) * STAGE_COLUMNS * 2 + STAGING_BYTES + ALIGNMENT
MIN_ROWS = 1024
"""Smallest number of rows of x that was measured."""
MIN_OCCUPANCY = 0.95
"""Share of cluster slots, over all waves, that must have an item for the kernel to be faster than the library
and a SiLU kernel: by 2 to 4 % with the weights of an 8B model, by more with smaller ones."""


def kernel_spec() -> KernelSpec:
    """Return the spec of the kernel, which is the same for all shapes."""
    return kernel_source("gate_up_swiglu", BATCH), "gate_up_swiglu", DEFINITIONS


def supports(weight: torch.Tensor) -> bool:
    """Return whether the kernel supports weights [rows, columns]."""
    rows, columns = weight.shape
    divisible = rows % 16 == 0 and columns % STAGE_COLUMNS == 0
    return weight.dtype == torch.bfloat16 and divisible and columns > STAGES * STAGE_COLUMNS


@functools.cache
def concurrent_clusters(device: torch.device) -> int:
    """Return how many clusters run at once on a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count // CLUSTER_SIZE


def count_tiles(rows: int, count: int) -> tuple[int, int]:
    """Return the pairs of tiles of `rows` weight rows, and the blocks of `count` rows of x."""
    return -(-rows // (TILE_ROWS * CLUSTER_SIZE)), -(-count // BATCH)


def is_faster(rows: int, count: int, clusters: int) -> bool:
    """Return whether the kernel is faster than the library for `rows` weight rows and `count` rows of x.

    `clusters` is the number of clusters that run at once.
    """
    pairs, blocks = count_tiles(rows, count)
    items = pairs * blocks
    waves = -(-items // clusters)
    return count >= MIN_ROWS and items >= MIN_OCCUPANCY * waves * clusters


def gate_up_swiglu(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x by the gate and up weights, and return silu(gate) * up.

    All tensors are bfloat16 and contiguous: `x` is [tokens, columns], and the result is [tokens, rows / 2].
    `weight` [rows, columns] holds the gate rows followed by the up rows; its shape must satisfy `supports`.
    """
    (rows, columns), size = weight.shape, weight.shape[0] // 2
    if out is None:
        out = torch.empty((len(x), size), dtype=x.dtype, device=x.device)
    function = load_kernel(*kernel_spec(), x.device.index or 0)
    box = (STAGE_COLUMNS, BATCH // CLUSTER_SIZE)
    input_map = make_tensor_map(x.data_ptr(), (columns, len(x)), (columns,), box)
    weight_map = make_weight_map(weight, TILE_ROWS, swiglu=True)
    pairs, blocks = count_tiles(rows, len(x))
    launch(
        function,
        (CLUSTER_SIZE * min(concurrent_clusters(x.device), pairs * blocks), 1, 1),
        384,
        (weight_map, input_map, out, size, len(x), columns // STAGE_COLUMNS, pairs, blocks),
        cluster=(CLUSTER_SIZE, 1, 1),
        shared_bytes=SHARED_BYTES,
    )
    return out
