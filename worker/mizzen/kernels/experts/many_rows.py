# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs of many rows per expert on Hopper GPUs: wgmma on operands in shared memory.

Pairs are sorted by expert, and those of an expert are divided into blocks of about equal size, which are the
N dimension of wgmma, as in `mizzen.kernels.gemm.swap_ab`. N is a multiple of 16, so few rows are wasted.
Inner dimensions are summed in ascending order in float32, so a row's result is the same in all batches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mizzen.kernels.experts import sorted_pairs
from mizzen.kernels.experts.gate import Gate
from mizzen.kernels.experts.sorted_pairs import SortedPairs
from mizzen.kernels.gemm.hopper import ALIGNMENT, ROW_BYTES, make_tensor_map, wgmma_source
from mizzen.kernels.gemm.w8a8_swap_ab import wgmma_source as coded_wgmma_source
from mizzen.kernels.launch import count_multiprocessors
from mizzen.kernels.nvrtc import KernelSpec, launch, load_kernel, read_source

TILE_ROWS = 256
"""Weight rows of a tile; with a gate, half of them are gate rows."""
GROUP_COLUMNS = 128
"""Columns of E4M3 inputs that share a scale."""
BOX_ROWS = 16
"""Rows of x that a TMA load copies, and divisor of the number of pairs that small tiles multiply."""
MAX_PAIRS = {False: 144, True: 128}
"""Largest number of pairs of a thread block with bfloat16 and with E4M3."""
THREADS = 384
"""Threads of a thread block: two warpgroups that multiply and one that loads."""
PAIR_STEP = 16
"""Divisor of the number of pairs that a tile multiplies."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
"""Registers of a thread of the warpgroups that multiply and of the one that loads; together they are those
of `THREADS` threads with 168 registers."""


@dataclass(frozen=True, slots=True)
class ManyRowsTile:
    """Tiling of the kernel."""

    pairs: int
    """Largest number of pairs of a thread block, a multiple of 16 up to `MAX_PAIRS`."""
    stages: int
    """Number of pipeline stages, each of 128 bytes of the inner dimension."""
    cluster: int = 1
    """Thread blocks, 1 or 2, that multiply different pairs of an expert by the same weights; each loads a
    part of these for both."""

    @property
    def block(self) -> int:
        """Largest number of pairs of a block of sorted pairs, which a cluster multiplies."""
        return self.pairs * self.cluster

    def shared_bytes(self, *, fp8: bool, has_gate: bool) -> int:
        """Return the dynamic shared memory of a thread block in bytes."""
        # Inner elements in bfloat16 are half as many as other outputs; those in E4M3 go through two tiles.
        staging = 64 * ((64 if has_gate and not fp8 else 128) + 8) * 2
        return ALIGNMENT + self.stages * (TILE_ROWS + self.pairs) * ROW_BYTES + staging


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyRowsOperand:
    """Inputs, outputs or weights of the kernel: bfloat16, or E4M3 with scales."""

    values: torch.Tensor
    """[rows, columns], contiguous; E4M3 as bytes of any type. Weights: those of all experts."""
    scales: torch.Tensor | None = None
    """float32 for E4M3. Inputs: [groups of `GROUP_COLUMNS` columns, rows or more]. Weights: [ceil(rows /
    row_step), groups of `GROUP_COLUMNS` columns, or 1]."""
    row_step: int = 1
    """Weight rows that share a scale."""

    @property
    def fp8(self) -> bool:
        """Whether the values are E4M3."""
        return self.scales is not None

    @property
    def by_row(self) -> bool:
        """Whether all columns of a weight row share a scale."""
        return self.scales is not None and self.scales.shape[1] == 1


def supports_columns(hidden: int, width: int, *, fp8: bool) -> bool:
    """Return whether the kernel supports experts with these numbers of inputs and of inner elements."""
    stage = ROW_BYTES if fp8 else ROW_BYTES // 2
    return hidden % stage == 0 and width % stage == 0


def _wgmma_template(pairs: int, *, fp8: bool) -> str:
    """Return the source of a function template `wgmma<N>` for the instructions of a tile."""
    functions, cases = "", ""
    for count in range(PAIR_STEP, pairs + 1, PAIR_STEP):
        name = f"wgmma_{count}"
        if fp8:
            functions += coded_wgmma_source(count, False).replace("void wgmma(", f"void {name}(")
        else:
            functions += wgmma_source(name, count)
        cases += f"    if constexpr (N == {count}) {name}(d, a, b, add);\n"
    head = "template <int N> __device__ __forceinline__ void wgmma(float* d, u64 a, u64 b, int add) {\n"
    return f"{functions}{head}{cases}}}\n"


@functools.cache
def kernel_source(pairs: int, *, fp8: bool) -> str:
    """Return the complete source of the kernel for tiles of up to `pairs` pairs."""
    names = ("bf16", "experts/gate", "gemm/hopper", "experts/many_rows_loads", "experts/many_rows")
    texts = "".join(read_source(name) for name in names)
    return "typedef unsigned long long u64;\n" + _wgmma_template(pairs, fp8=fp8) + texts


def kernel_spec(
    tile: ManyRowsTile, weight: ManyRowsOperand, gate: Gate | None, *, biased: bool
) -> KernelSpec:
    """Return the spec of the kernel of gate and up (with a gate) or of the down projections."""
    defines = (
        ("PAIRS", tile.pairs),
        ("STAGES", tile.stages),
        ("CLUSTER", tile.cluster),
        ("SWIGLU", int(gate is not None)),
        ("GATE", -1 if gate is None else gate.number),
        ("BIAS", int(biased)),
        ("FP8", int(weight.fp8)),
        ("PAIR_STEP", PAIR_STEP),
        ("BY_ROW", int(weight.by_row)),
        ("CONSUMER_REGISTERS", CONSUMER_REGISTERS),
        ("PRODUCER_REGISTERS", PRODUCER_REGISTERS),
    )
    return kernel_source(tile.pairs, fp8=weight.fp8), "many_rows", defines


def make_expert_map(weight: torch.Tensor, held: int, box_rows: int, *, has_gate: bool) -> Any:
    """Make the TMA descriptor of the weights of `held` experts, for loads of 128 bytes of `box_rows` rows.

    `weight` is [held * rows, columns]. With a gate, each load alternates eight gate rows with the
    corresponding eight up rows.
    """
    rows, columns, size = len(weight) // held, weight.shape[1], weight.element_size()
    stage = ROW_BYTES // size
    if not has_gate:
        dims, strides = (columns, rows, held), (columns, rows * columns)
        return make_tensor_map(weight.data_ptr(), dims, strides, (stage, box_rows, 1), size)
    half = rows // 2
    dims = (columns, 8, 2, half // 8, held)
    strides = (columns, half * columns, 8 * columns, rows * columns)
    return make_tensor_map(weight.data_ptr(), dims, strides, (stage, 8, 2, box_rows // 16, 1), size)


def _allocate(weight: ManyRowsOperand, count: int, size: int, *, has_gate: bool) -> ManyRowsOperand:
    """Allocate the outputs of `count` pairs: E4M3 if they are inner elements of E4M3 experts."""
    device = weight.values.device
    if not (weight.fp8 and has_gate):
        return ManyRowsOperand(values=torch.empty(count, size, dtype=torch.bfloat16, device=device))
    values = torch.empty(count, size, dtype=torch.float8_e4m3fn, device=device)
    return ManyRowsOperand(values=values, scales=torch.empty(-(-size // GROUP_COLUMNS), count, device=device))


def _launch(
    x: ManyRowsOperand,
    per_row: int,
    pairs: SortedPairs,
    weight: ManyRowsOperand,
    held: int,
    tile: ManyRowsTile,
    gate: Gate | None,
    bias: torch.Tensor | None,
) -> ManyRowsOperand:
    """Multiply all sorted pairs by the weights of their experts; for the arguments see `gate_up_many_rows`.

    Raises:
        ValueError: The pairs were sorted into blocks of another size than the tile's.
    """
    if pairs.block != tile.block:
        raise ValueError(f"the blocks have up to {pairs.block} pairs, but the tile is for {tile.block}")
    has_gate, device, values = gate is not None, weight.values.device, weight.values
    rows, columns, count = len(values) // held, values.shape[1], len(pairs.pairs)
    row_bytes = columns * values.element_size()
    size = rows // 2 if has_gate else rows
    out = _allocate(weight, count, size, has_gate=has_gate)
    weight_map = make_expert_map(values, held, TILE_ROWS // tile.cluster, has_gate=has_gate)
    # The kernel of gate and up gathers its inputs without a descriptor.
    box = (ROW_BYTES // values.element_size(), BOX_ROWS)
    input_map = weight_map
    if not has_gate:
        input_map = make_tensor_map(
            x.values.data_ptr(), (columns, count), (columns,), box, values.element_size()
        )
    blocks = count_multiprocessors(device) // tile.cluster * tile.cluster
    arguments = (
        weight_map, input_map, x.values, x.scales, weight.scales, bias, out.values, out.scales,
        pairs.pairs, pairs.blocks, pairs.count,
        per_row, row_bytes, size, rows, row_bytes // ROW_BYTES, -(-rows // TILE_ROWS), weight.row_step,
        1 if weight.scales is None else weight.scales.shape[1],
        0 if x.scales is None else x.scales.stride(0), count,
        float(0 if gate is None else gate.limit), float(0 if gate is None else gate.slope),
    )  # fmt: skip
    spec = kernel_spec(tile, weight, gate, biased=bias is not None)
    launch(
        load_kernel(*spec, device.index or 0),
        (blocks, 1, 1),
        THREADS,
        arguments,
        cluster=None if tile.cluster == 1 else (tile.cluster, 1, 1),
        shared_bytes=tile.shared_bytes(fp8=weight.fp8, has_gate=has_gate),
    )
    return out


def gate_up_many_rows(
    x: ManyRowsOperand,
    per_token: int,
    pairs: SortedPairs,
    weight: ManyRowsOperand,
    held: int,
    gate: Gate,
    tile: ManyRowsTile,
    bias: torch.Tensor | None = None,
) -> ManyRowsOperand:
    """Multiply each pair's token by gate and up of its expert; return activation(gate) * up, [pairs, width].

    The rows of the result are in the order of the sorted pairs; those of pairs of other ranks' experts are
    not written. With E4M3 weights, the result is E4M3, too, rounded from bfloat16, with a scale for each pair
    and `GROUP_COLUMNS` columns.

    Args:
        x: Inputs [tokens, hidden] in the type of the weights; `supports_columns` must accept their columns.
        per_token: Number of experts that a token chooses.
        pairs: Pairs, sorted into blocks of `tile.block`.
        weight: Gate rows, then up rows, of each expert, [held * 2 * width, hidden].
        held: Number of experts of the weights.
        gate: Function of gate and up.
        tile: Tiling.
        bias: Biases of the weight's rows, bfloat16 [held, 2 * width].

    Raises:
        ValueError: The pairs were sorted into blocks of another size than the tile's.
    """
    return _launch(x, per_token, pairs, weight, held, tile, gate, bias)


def down_many_rows(
    inner: ManyRowsOperand,
    pairs: SortedPairs,
    weight: ManyRowsOperand,
    held: int,
    tile: ManyRowsTile,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each pair's inner elements by down of its expert; return the outputs [pairs, hidden].

    The result is bfloat16. Its rows are in the order of the pairs before they were sorted; those of other
    ranks' experts are not written.

    Args:
        inner: Inner elements [pairs, width] as `gate_up_many_rows` returns them.
        pairs: Pairs, sorted into blocks of `tile.block`.
        weight: Down projections [held * hidden, width].
        held: Number of experts of the weights.
        tile: Tiling.
        bias: Biases of the outputs, bfloat16 [held, hidden].

    Raises:
        ValueError: The pairs were sorted into blocks of another size than the tile's.
    """
    return _launch(inner, 1, pairs, weight, held, tile, None, bias).values


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyRowsExperts:
    """The experts of a rank, as the kernel takes them."""

    gate_up: ManyRowsOperand
    """Gate rows, then up rows, of each expert, [held * 2 * width, hidden]."""
    down: ManyRowsOperand
    """Down projections [held * hidden, width]."""
    held: int
    gate: Gate
    gate_up_bias: torch.Tensor | None = None
    """Biases, bfloat16 [held, 2 * width]."""
    down_bias: torch.Tensor | None = None
    """Biases, bfloat16 [held, hidden]."""

    def multiply(
        self, x: ManyRowsOperand, per_token: int, pairs: SortedPairs, tile: ManyRowsTile
    ) -> torch.Tensor:
        """Return the outputs of all pairs, [pairs, hidden]; see `gate_up_many_rows` and `down_many_rows`."""
        inner = gate_up_many_rows(
            x, per_token, pairs, self.gate_up, self.held, self.gate, tile, self.gate_up_bias
        )
        return down_many_rows(inner, pairs, self.down, self.held, tile, self.down_bias)

    def kernels(self, tile: ManyRowsTile) -> Iterator[tuple[KernelSpec, int]]:
        """Yield the specs of all kernels of a batch, each with the shared memory of a block in bytes."""
        for weight, gate, bias in (
            (self.gate_up, self.gate, self.gate_up_bias),
            (self.down, None, self.down_bias),
        ):
            spec = kernel_spec(tile, weight, gate, biased=bias is not None)
            yield spec, tile.shared_bytes(fp8=weight.fp8, has_gate=gate is not None)
        count, place = sorted_pairs.kernel_specs(self.held)
        yield count, 0
        yield place, sorted_pairs.shared_bytes(self.held)
