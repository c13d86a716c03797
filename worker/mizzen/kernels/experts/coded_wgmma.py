# SPDX-License-Identifier: Apache-2.0
"""A layer's products with quantized experts by `wgmma`, limited by the bandwidth at which weights are read.

One kernel gathers the inputs of all pairs in the order of their experts. Another one multiplies them by gate
and up, and the results by down: its blocks stay on the GPU, and load the codes of their next product while
they multiply, also from the first projection to the second. See `coded_wgmma.cu`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from mizzen.kernels.experts.gate import Gate
from mizzen.kernels.experts.matrices import ExpertMatrices
from mizzen.kernels.gemm.hopper import (
    ALIGNMENT,
    MAX_SHARED_BYTES,
    make_tensor_map,
    register_wgmma_sources,
)
from mizzen.kernels.launch import count_multiprocessors, has_wgmma
from mizzen.kernels.nvrtc import KernelSpec, launch, load_kernel, read_source
from mizzen.layers.quantized.canonical import Codes

MAX_PAIRS = 2048
"""Maximum number of pairs of a batch."""
MAX_EXPERTS = 128
"""Maximum number of experts, whose counts of pairs each block keeps in shared memory."""
COLUMN_STEP = 32
"""Columns that share a scale."""
BLOCK_COLUMNS = 128
"""Columns whose order differs between a product and memory; rows of inputs are multiples of them."""
PAIR_TILES = (1, 2, 3, 4, 6, 8)
"""Tiles of 8 pairs of an expert that a kernel distinguishes."""
STAGE_COLUMNS = 256
"""Columns of a stage."""
UNIT_ROWS = 64
"""Weight rows of a unit, which a warpgroup multiplies at a time."""
UNIT_CODE_BYTES = 8192
"""Codes of a unit in a stage."""
PAIR_TILE_BYTES = 4096
"""Inputs of 8 pairs in a stage."""
INPUT_THREADS = 128
"""Threads of a block that gathers inputs."""
STATIC_BYTES = 4096
"""Room for the shared memory that the kernel declares, for up to 128 experts."""
PARTS = (
    "bf16",
    "experts/gate",
    "experts/e2m1",
    "gemm/hopper",
    "experts/coded_wgmma_loads",
    "experts/coded_wgmma",
)


@dataclass(frozen=True, slots=True)
class CodedWgmmaTile:
    """Tiling of both products."""

    n_tiles: int
    """Tiles of 8 pairs that a block multiplies at once, one of `PAIR_TILES`."""
    warpgroups: int
    """Warpgroups of a block with different weight rows, 64 each."""
    stages: int
    """Blocks of 256 columns in shared memory or on their way there."""
    fragments: int
    """Products of 16 columns that are decoded while as many are multiplied: 2 or 4."""

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.warpgroups + 64

    def shared_bytes(self, columns: int) -> int:
        """Return the dynamic shared memory of a block in bytes; a row has at most `columns` columns."""
        stage = self.warpgroups * UNIT_CODE_BYTES + self.n_tiles * PAIR_TILE_BYTES
        scales = 2 * self.warpgroups * UNIT_ROWS * (columns // COLUMN_STEP)
        # Stages are aligned. The last block of columns may be incomplete, but scales of a whole one are read.
        return ALIGNMENT + self.stages * stage + scales + 16

    def fits(self, hidden: int, width: int) -> bool:
        """Return whether a block fits into shared memory, and steps are longer than the ring of stages.

        Warpgroups announce finished inner elements with one counter. It counts right if none of them can be
        two steps ahead of another, so a step of gate and up must have more stages than the ring.
        """
        fits = self.shared_bytes(max(hidden, width)) <= MAX_SHARED_BYTES - STATIC_BYTES
        return fits and -(-hidden // STAGE_COLUMNS) > self.stages


def supports(gate_up: ExpertMatrices, down: ExpertMatrices) -> bool:
    """Return whether the kernel supports the weights of a layer; it needs a GPU of the Hopper generation."""
    return (
        has_wgmma(down.values.device)
        and all(
            weight.codes is Codes.E2M1
            and weight.column_step == COLUMN_STEP
            and weight.row_step == 1
            and weight.orders is None
            and weight.zeros is None
            and weight.columns % COLUMN_STEP == 0
            for weight in (gate_up, down)
        )
        and down.columns % (UNIT_ROWS // 2) == 0
        and down.rows % UNIT_ROWS == 0
        and down.experts <= MAX_EXPERTS
    )


def padded(columns: int) -> int:
    """Return the columns of a row of inputs in memory."""
    return -(-columns // BLOCK_COLUMNS) * BLOCK_COLUMNS


def kernel_spec(
    gate_up: ExpertMatrices, down: ExpertMatrices, tile: CodedWgmmaTile, gate: Gate, *, biased: bool
) -> KernelSpec:
    """Return the spec of the kernel of both products."""
    definitions = (
        ("HIDDEN", gate_up.columns),
        ("WIDTH", down.columns),
        ("HELD", down.experts),
        ("SWIGLU", 1),
        ("GATE", gate.number),
        ("HAS_BIAS", int(biased)),
        ("MAX_PAIRS", MAX_PAIRS),
        ("N_TILES", tile.n_tiles),
        ("WARPGROUPS", tile.warpgroups),
        ("STAGES", tile.stages),
        ("FRAGMENTS", tile.fragments),
    )
    batches = tuple(8 * tiles for tiles in PAIR_TILES if tiles <= tile.n_tiles)
    return _source(batches, tile.fragments), "coded_wgmma", definitions


@functools.cache
def _source(batches: tuple[int, ...], fragments: int) -> str:
    texts = (read_source(name) for name in PARTS)
    return "typedef unsigned long long u64;\n" + register_wgmma_sources(batches, fragments) + "".join(texts)


def inputs_spec(gate_up: ExpertMatrices, down: ExpertMatrices, per_token: int) -> KernelSpec:
    """Return the spec of the kernel that gathers inputs, for tokens with that many experts."""
    definitions = (
        ("COLUMNS", gate_up.columns),
        ("INNER", down.columns),
        ("HELD", down.experts),
        ("PER_TOKEN", per_token),
        ("THREADS", INPUT_THREADS),
    )
    return read_source("experts/coded_inputs"), "coded_inputs", definitions


@dataclass(frozen=True, slots=True)
class OrderedPairs:
    """Pairs in the order of their experts; `coded_inputs.cu` describes the order of columns."""

    inputs: torch.Tensor
    """Inputs of the pairs, bfloat16 [pairs, hidden], with columns behind the last."""
    inner: torch.Tensor
    """Room for their inner elements, bfloat16 [pairs, width], with columns behind the last."""
    order: torch.Tensor
    """The pairs themselves, int32 [pairs]."""
    done: torch.Tensor
    """Zeros, int32 [pairs]: see `coded_wgmma_loads.cu`."""


def order_pairs(
    x: torch.Tensor, chosen: torch.Tensor, gate_up: ExpertMatrices, down: ExpertMatrices
) -> OrderedPairs:
    """Gather the inputs of pairs; see `multiply_pairs`. Pairs of experts outside [0, held) have no place."""
    pairs, options = chosen.numel(), {"dtype": x.dtype, "device": x.device}
    ordered = OrderedPairs(
        torch.empty(pairs, padded(gate_up.columns), **options),
        torch.empty(pairs, padded(down.columns), **options),
        torch.empty(pairs, dtype=torch.int32, device=x.device),
        torch.empty(pairs, dtype=torch.int32, device=x.device),
    )
    launch(
        load_kernel(*inputs_spec(gate_up, down, chosen.shape[1]), x.device.index or 0),
        len(chosen),
        INPUT_THREADS,
        (x, chosen, ordered.inputs, ordered.inner, ordered.order, ordered.done, pairs),
    )
    return ordered


def weight_map(weight: ExpertMatrices, *, has_gate: bool) -> Any:
    """Return the TMA descriptor of codes for loads of 128 bytes of 64 rows.

    With a gate, eight gate rows alternate with their eight up rows.
    """
    address, line, rows = weight.values.data_ptr(), weight.columns // 2, len(weight.values)
    if not has_gate:
        return make_tensor_map(address, (line, rows), (line,), (128, UNIT_ROWS), 1)
    dims, strides = (line, 8, 2, rows // 8), (line, weight.rows // 2 * line, 8 * line)
    return make_tensor_map(address, dims, strides, (128, 8, 2, UNIT_ROWS // 16), 1)


def input_map(inputs: torch.Tensor) -> Any:
    """Return the TMA descriptor of ordered inputs for loads of four parts of 64 columns of 8 pairs."""
    pairs, pitch = inputs.shape
    return make_tensor_map(inputs.data_ptr(), (64, pairs, pitch // 64), (pitch, 64), (64, 8, 4))


def multiply_pairs(
    x: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    gate: Gate,
    tile: CodedWgmmaTile,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each pair's token by its expert; return the outputs of all pairs, [pairs, hidden].

    Rows of pairs whose experts are outside [0, held) are not written.

    Args:
        x: Inputs, bfloat16 [tokens, hidden] and contiguous.
        chosen: Experts of each token, int64 [tokens, per_token] and contiguous, at most `MAX_PAIRS`.
        gate_up: Gate rows, then up rows, of each expert; `supports` must accept the weights.
        down: Down projections.
        gate: Function of gate and up.
        tile: Tiling.
        gate_up_bias: Biases of the rows of gate and up, [held, 2 * width].
        down_bias: Biases of the outputs, [held, hidden]; of both projections or of none.

    Raises:
        ValueError: There are more than `MAX_PAIRS` pairs, or only one of the biases.
    """
    if (gate_up_bias is None) != (down_bias is None):
        raise ValueError("both projections have biases, or none")
    if chosen.numel() > MAX_PAIRS:
        raise ValueError(f"{chosen.numel()} pairs are more than {MAX_PAIRS}")
    pairs = order_pairs(x, chosen, gate_up, down)
    out = torch.empty(chosen.numel(), down.rows, dtype=x.dtype, device=x.device)
    maps = (
        input_map(pairs.inputs),
        weight_map(gate_up, has_gate=True),
        input_map(pairs.inner),
        weight_map(down, has_gate=False),
    )
    weights = (gate_up.scales, gate_up_bias, down.scales, down_bias)
    limits = (float(gate.limit), float(gate.slope))
    spec = kernel_spec(gate_up, down, tile, gate, biased=down_bias is not None)
    launch(
        load_kernel(*spec, x.device.index or 0),
        count_multiprocessors(x.device),
        tile.threads,
        (*maps, chosen, *weights, pairs.order, pairs.done, pairs.inner, out, chosen.numel(), *limits),
        shared_bytes=tile.shared_bytes(max(gate_up.columns, down.columns)),
    )
    return out
