# SPDX-License-Identifier: Apache-2.0
"""Fused gate-up GEMM with SwiGLU for large M, used by prefills.

A library GEMM writes gate and up to memory, and a SiLU kernel reads them back: 805 MB for 8,192 rows of x and
24,576 weight rows, which takes a twentieth of the GEMM's time. Here, one thread accumulates both elements of
a gate-up pair, so only the result is written. The technique is that of CUTLASS' persistent Hopper kernels;
see `gate_up_swiglu.cu`.
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
"""Number of blocks in a cluster; they load x together and have a tile of weight rows each."""
STAGES = 4
"""Number of pipeline stages."""
TILE_GROUP = 8
"""Number of tile pairs (one pair per cluster) that are multiplied by all of x before the next pairs are."""
DEFINITIONS = (
    ("BATCH", BATCH),
    ("SWIGLU", 1),
    ("TILE_GROUP", TILE_GROUP),
    ("TILE_ROWS", TILE_ROWS),
    ("CLUSTER_SIZE", CLUSTER_SIZE),
    ("STAGES", STAGES),
)
STAGING_BYTES = 2 * 64 * (TILE_ROWS // 2 + 8) * 2
"""Bytes of shared memory through which a block's outputs pass."""
SHARED_BYTES = STAGES * (TILE_ROWS + BATCH) * STAGE_COLUMNS * 2 + STAGING_BYTES + ALIGNMENT
MIN_ROWS = 1024
"""Smallest number of rows of x for which the kernel was measured."""
MIN_OCCUPANCY = 0.95
"""Minimum share of busy cluster slots, over all waves of clusters; below it, the kernel is not used.

From this share on, the kernel is faster than a library GEMM and a SiLU kernel: by 2 to 4 % with the weights
of an 8B model, by more with smaller weights.
"""


def kernel_spec() -> KernelSpec:
    """Return the spec of the kernel, which is the same for all shapes."""
    return kernel_source("gate_up_swiglu", BATCH), "gate_up_swiglu", DEFINITIONS


def supports(weight: torch.Tensor) -> bool:
    """Return whether the kernel supports the dtype and shape of a weight [rows, columns].

    The weight must be bfloat16. The number of its rows must be a multiple of 16. The number of its columns
    must be a multiple of `STAGE_COLUMNS`, and above `STAGES * STAGE_COLUMNS`.
    """
    rows, columns = weight.shape
    divisible = rows % 16 == 0 and columns % STAGE_COLUMNS == 0
    return weight.dtype == torch.bfloat16 and divisible and columns > STAGES * STAGE_COLUMNS


@functools.cache
def concurrent_clusters(device: torch.device) -> int:
    """Return the maximum number of clusters that run at once on a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count // CLUSTER_SIZE


def count_tiles(rows: int, count: int) -> tuple[int, int]:
    """Return two counts: of tile pairs for `rows` weight rows, and of blocks for `count` rows of x."""
    return -(-rows // (TILE_ROWS * CLUSTER_SIZE)), -(-count // BATCH)


def is_faster(rows: int, count: int, clusters: int) -> bool:
    """Return whether the kernel is faster than a library GEMM for `rows` weight rows and `count` rows of x.

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
