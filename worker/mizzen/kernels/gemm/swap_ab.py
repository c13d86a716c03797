"""Products of up to 256 rows with a weight matrix, for batches of decodes.

Weights stand where a tensor core has its own 64 rows and the batch where it takes 8 to 256 columns, so that
small batches waste little and large ones share each weight that was fetched once. The copy engine brings both
operands to shared memory, weights before the kernel waits for the one ahead of it; parts of the inner
dimension are summed inside a cluster of blocks, in one order. The technique is that of CUTLASS' kernels for
Hopper (warp-specialised, with multicast); see `wide.cu`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mizzen.kernels.gemm.hopper import (
    ALIGNMENT,
    COLUMNS,
    SHARED_BYTES,
    kernel_source,
    make_tensor_map,
    make_weight_map,
)
from mizzen.kernels.gemm.tile_configs import CUTS, WIDEST
from mizzen.kernels.nvrtc import KernelSpec, load_kernel, launch

BATCHES = tuple(range(16, 257, 16))
"""Rows of x that the kernel is compiled for."""
MEASURED = (16, 32, 48, 64, 96, 128, 192, 256)
"""Those of them at which all shapes were measured; others are cut as the next of these, or as `CUTS` says."""
MULTIPROCESSORS = 132
LARGEST_CLUSTER = 8
"""Blocks of a cluster that every GPU with clusters can run together."""
LONGEST_BY_RULE = 16 << 10
"""Columns up to which a shape that was not measured is taken for faster than cuBLAS."""
LARGEST = 64 << 10
"""Outputs at most: for more, which are those of output heads, cuBLAS is as fast."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut into blocks."""

    rows: int
    """Weight rows of a block: 64, 128 or 192."""
    split: int
    """Parts of the inner dimension."""
    share: int
    """Blocks that fetch x together."""
    blocks: int = 1
    """Blocks that fit on a multiprocessor: of two, one may be the next kernel's, with its first weights."""

    def stages(self, batch: int, steps: int) -> int:
        """Return the depth of the pipeline; 0 where not even two stages fit."""
        stage = (self.rows + batch) * COLUMNS * 2
        fit = (SHARED_BYTES // self.blocks - ALIGNMENT - 512) // stage
        return 0 if fit < 2 else min(fit, steps, 16)

    def shared_bytes(self, batch: int, steps: int) -> int:
        """Return the shared memory of a block."""
        pipeline = self.stages(batch, steps) * (self.rows + batch) * COLUMNS * 2
        staging = -(-batch // 8 // self.split) * 8 * (self.rows + 8) * 2
        sums = self.rows * batch * 4 if self.split > 1 else 0
        return max(pipeline, sums + staging) + ALIGNMENT

    def serves(self, rows: int, columns: int, batch: int) -> bool:
        """Tell whether a product can be cut so."""
        steps = columns // COLUMNS // self.split
        return (
            columns % COLUMNS == 0
            and rows % 8 == 0
            and batch % (8 * self.share) == 0
            and self.split * self.share <= LARGEST_CLUSTER
            and self.stages(batch, steps) >= 2
            and self.shared_bytes(batch, steps) <= SHARED_BYTES // self.blocks
        )


def cut_of(rows: int, columns: int, count: int) -> Cut | None:
    """Choose how to cut a product of `count` rows; None where nothing serves it."""
    found = fitting(rows, columns, count)
    return None if found is None else found[1]


@functools.cache
def fitting(rows: int, columns: int, count: int, cut: Cut | None = None) -> tuple[int, Cut] | None:
    """Return how many rows a product of `count` is compiled for, and its cut (this one, or that chosen).

    As few as a cut serves, for those that are not there are multiplied, too. None where none does.
    """
    for batch in BATCHES:
        if batch >= count:
            chosen = cut or chosen_cut(rows, columns, batch)
            if chosen.serves(rows, columns, batch):
                return batch, chosen
    return None


def chosen_cut(rows: int, columns: int, batch: int) -> Cut:
    """Choose a cut by what was measured, else by rule."""
    cuts = CUTS.get((rows, columns), {})
    near = next(size for size in MEASURED if batch <= size)
    return Cut(*(cuts.get(batch) or cuts.get(near) or choose(rows, columns, batch)))


def choose(rows: int, columns: int, batch: int) -> tuple[int, int, int, int]:
    """Return weight rows of a block, parts of the inner dimension, blocks that share x, blocks at a time.

    Of shapes that were not measured: blocks for about all multiprocessors in one go; of long inner dimensions
    rather many parts than blocks of few weight rows, each of which fetches all of x.
    """

    def tiles(height: int) -> int:
        return -(-rows // height)

    if tiles(64) > MULTIPROCESSORS:
        height = 128 if tiles(128) <= MULTIPROCESSORS else 192
        return height, 1, 2 if batch > 128 else 1, 1
    if rows <= columns >= 4096 and (columns < 8192 or batch > 64) and tiles(192) * 4 <= MULTIPROCESSORS:
        return 192, 4, 1, 1
    most = MULTIPROCESSORS if columns >= 4096 else MULTIPROCESSORS // 2
    split = max(split for split in (1, 2, 4) if split == 1 or tiles(64) * split <= most)
    return (64, split, 1, 2) if batch <= 64 else (64, split, 4 if split == 1 else 1, 1)


def widest(weight: torch.Tensor, *, gate: bool = False) -> int:
    """Return for how many rows of x the kernel was measured to be no slower than cuBLAS; 0 where for none.

    Measured inside whole steps, behind and ahead of other kernels.
    """
    rows, columns = weight.shape
    if columns % COLUMNS or (gate and rows % 16) or rows > LARGEST:
        return 0
    rule = 256 if gate else 192 if columns >= 3072 else 64
    if columns > LONGEST_BY_RULE:
        rule = max(CUTS.get((rows, columns), {}), default=0)
    most = WIDEST.get((rows, columns), rule)
    return most if all(cut_of(rows, columns, batch) for batch in BATCHES if batch <= most) else 0


def definitions(
    batch: int, cut: Cut, stages: int, *, gate: bool, late: bool = False
) -> tuple[tuple[str, int], ...]:
    """Return what the source is compiled with."""
    return (
        ("BATCH", batch),
        ("ROWS", cut.rows),
        ("SPLIT", cut.split),
        ("SHARE", cut.share),
        ("STAGES", stages),
        ("GATE", int(gate)),
        ("LATE", int(late)),
        ("ROTATE", 1),
    )


def kernel(columns: int, batch: int, cut: Cut, *, gate: bool, late: bool) -> KernelSpec:
    """Return what a product is compiled from."""
    stages = cut.stages(batch, columns // COLUMNS // cut.split)
    return kernel_source("swap_ab", batch), "wide", definitions(batch, cut, stages, gate=gate, late=late)


def kernel_specs(
    rows: int, columns: int, counts: Iterable[int], *, gate: bool = False, late: bool = False
) -> set[KernelSpec]:
    """Return what products of so many rows with weights [rows, columns] are compiled from."""
    found = {fitting(rows, columns, count) for count in counts}
    return {kernel(columns, *fit, gate=gate, late=late) for fit in found if fit is not None}


def wide(
    weight: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    gate: bool = False,
    late: bool = False,
    cut: Cut | None = None,
) -> torch.Tensor:
    """Return x [1 to 256, columns] times the transpose of weight [rows, columns]: [len(x), rows], bfloat16.

    With `gate`, weight's rows are gates and then what they multiply, and the result is
    silu(gates) * others [len(x), rows / 2]. With `late`, the kernel behind begins when the sums are there
    instead of at once: blocks of attention that begin early crowd on the multiprocessors that this one
    leaves free, and stay there. All are contiguous.

    Raises:
        ValueError: no cut, or not this one, serves the shape.
    """
    rows, columns = weight.shape
    fit = fitting(rows, columns, len(x), cut)
    if fit is None:
        raise ValueError(f"no cut of {rows} x {columns} weights for {len(x)} rows: {cut}")
    batch, cut = fit
    outputs = rows // (1 + gate)
    if out is None:
        out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    function = load_kernel(*kernel(columns, batch, cut, gate=gate, late=late), x.device.index or 0)
    inputs = make_tensor_map(x.data_ptr(), (columns, len(x)), (columns,), (COLUMNS, batch // cut.share))
    tiles = -(-rows // cut.rows)
    tiles = -(-tiles // cut.share) * cut.share
    launch(
        function,
        (tiles, cut.split, 1),
        128 * (1 if cut.rows == 64 else 2) + 128,
        (make_weight_map(weight, cut.rows, gate=gate), inputs, out, outputs, len(x), columns // COLUMNS),
        cluster=(cut.share, cut.split, 1),
        shared=cut.shared_bytes(batch, columns // COLUMNS // cut.split),
    )
    return out
