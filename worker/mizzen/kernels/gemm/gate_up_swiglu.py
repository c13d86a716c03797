"""The gated product of many rows, silu(gates) * others, of the weights that make both, in one kernel.

A library writes gates and others to memory, where a kernel for SiLU reads them: 805 MB for 8,192 rows and
24,576 outputs, a twentieth of the product's time. Here a thread's sums hold both of a pair. The technique is
that of CUTLASS' persistent kernels for Hopper; see `gated.cu`.
"""

from __future__ import annotations

import functools

import torch

from mizzen.kernels.gemm.hopper import ALIGNMENT, COLUMNS, kernel_source, make_tensor_map, make_weight_map
from mizzen.kernels.nvrtc import KernelSpec, load_kernel, launch

HEIGHT = 128
"""Weight rows of a block."""
BATCH = 256
"""Rows of x of a block."""
SHARE = 2
"""Blocks of a cluster, which fetch x together."""
STAGES = 4
GROUP = 8
"""Pairs of tiles that all rows of x are multiplied with before the next ones."""
DEFINITIONS = (
    ("BATCH", BATCH),
    ("GATE", 1),
    ("GROUP", GROUP),
    ("ROWS", HEIGHT),
    ("SHARE", SHARE),
    ("STAGES", STAGES),
)
STAGING = 2 * 64 * (HEIGHT // 2 + 8) * 2
"""Bytes through which outputs go."""
SHARED = STAGES * (HEIGHT + BATCH) * COLUMNS * 2 + STAGING + ALIGNMENT
FEWEST = 1024
"""Rows of x from which it was measured."""
FULLEST = 0.95
"""Of all clusters in all their rounds, what part has to have an item for the kernel to be faster than the
library and a kernel for SiLU: then it was, by 2 to 4 % with an 8B's weights, by more with smaller ones."""


def kernel() -> KernelSpec:
    """Return what the product of any shape is compiled from."""
    return kernel_source("gate_up_swiglu", BATCH), "gated", DEFINITIONS


def serves(weight: torch.Tensor) -> bool:
    """Tell whether weights [rows, columns] can be multiplied."""
    rows, columns = weight.shape
    whole = rows % 16 == 0 and columns % COLUMNS == 0
    return weight.dtype == torch.bfloat16 and whole and columns > STAGES * COLUMNS


@functools.cache
def clusters(device: torch.device) -> int:
    """Return how many clusters run at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count // SHARE


def pieces(rows: int, count: int) -> tuple[int, int]:
    """Return the pairs of tiles of so many weight rows, and the blocks of so many rows of x."""
    return -(-rows // (HEIGHT * SHARE)), -(-count // BATCH)


def pays(rows: int, count: int, at_once: int) -> bool:
    """Tell whether weights of so many rows should be multiplied by `count` rows of x.

    `at_once` is how many clusters run at a time.
    """
    pairs, blocks = pieces(rows, count)
    items = pairs * blocks
    rounds = -(-items // at_once)
    return count >= FEWEST and items >= FULLEST * rounds * at_once


def gated(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return silu(gates) * others [tokens, rows / 2] of x [tokens, columns], bfloat16, all contiguous.

    `weight` [rows, columns] has the gates' rows first, then those of what they multiply; `serves` tells of
    which shapes it can be.
    """
    (rows, columns), size = weight.shape, weight.shape[0] // 2
    if out is None:
        out = torch.empty((len(x), size), dtype=x.dtype, device=x.device)
    function = load_kernel(*kernel(), x.device.index or 0)
    inputs = make_tensor_map(x.data_ptr(), (columns, len(x)), (columns,), (COLUMNS, BATCH // SHARE))
    pairs, blocks = pieces(rows, len(x))
    launch(
        function,
        (SHARE * min(clusters(x.device), pairs * blocks), 1, 1),
        384,
        (make_weight_map(weight, HEIGHT, gate=True), inputs, out, size, len(x), columns // COLUMNS, pairs, blocks),
        cluster=(SHARE, 1, 1),
        shared=SHARED,
    )
    return out
