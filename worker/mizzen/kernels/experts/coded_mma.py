# SPDX-License-Identifier: Apache-2.0
"""Products of small batches with quantized experts, limited by the bandwidth at which weights are read.

A block multiplies all pairs of an expert by some of its weight rows. It finds them in the router's choice, so
nothing is sorted before. Inputs and codes are copied to shared memory as they are, several chunks of columns
ahead; lanes decode the codes that they need as operands of `mma.sync`. See `coded_mma.cu`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mizzen.kernels.experts.gate import Gate
from mizzen.kernels.experts.matrices import ExpertMatrices
from mizzen.kernels.launch import has_wgmma
from mizzen.kernels.nvrtc import KernelSpec, launch, load_kernel, read_source
from mizzen.layers.quantized.canonical import Codes

MAX_PAIRS = 2048
"""Maximum number of pairs of a batch, which each block keeps in shared memory."""
MAX_EXPERTS = 1024
"""Maximum number of experts: each block keeps a bit mask of 32 words."""
BLOCK_COLUMNS = 128
"""Columns of a row that four lanes load together, 16 bytes each."""
COLUMN_STEPS = {Codes.E2M1: 32, Codes.UINT4: BLOCK_COLUMNS, Codes.E4M3: BLOCK_COLUMNS}
"""Columns that share a scale, for the codes that the kernel supports."""
CODE_MACROS = {Codes.E2M1: 0, Codes.UINT4: 1, Codes.E4M3: 2}
SCALE_MACROS = {torch.uint8: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
PARTS = "".join(
    read_source(part)
    for part in ("bf16", "experts/gate", "experts/e2m1", "experts/coded_operands", "experts/coded_parts")
)
"""Texts that the kernels of `few_mma.cu` share."""
SOURCE = PARTS + read_source("experts/coded_pairs") + read_source("experts/coded_mma")


@dataclass(frozen=True, slots=True)
class CodedMmaTile:
    """Tiling of a product."""

    n_tiles: int
    """Tiles of 8 pairs that a block multiplies at once: 1, 2, 3, 4, 6 or 8."""
    m_tiles: int
    """Tiles of 16 weight rows per warp: 1, 2 or 4."""
    m_warps: int
    """Warps of a block with different weight rows."""
    k_split: int
    """Warps of a block with the same weight rows and different columns."""
    chunk: int
    """Blocks of 128 columns that a warp multiplies between two barriers."""
    stages: int
    """Chunks in shared memory or on their way there, at least 2."""
    blocks_per_sm: int
    """Blocks per SM for which registers are allocated."""
    row_tiles: int = 1
    """Maximum number of tiles of rows that a block multiplies one after the other; see `fit`."""

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.m_warps * self.k_split

    def outputs(self, *, has_gate: bool) -> int:
        """Return the outputs of a block; with a gate, each of them has a gate row and an up row."""
        return self.row_tiles * self.m_warps * self.m_tiles * (8 if has_gate else 16)

    def fit(self, weight: ExpertMatrices, *, has_gate: bool) -> CodedMmaTile:
        """Return the tiling for weights, with at most as many `row_tiles`, such that they fill all blocks.

        It has more than one only without a gate, with E4M3 and without `k_split`.
        """
        row_tiles = self.row_tiles if weight.codes is Codes.E4M3 and not has_gate and self.k_split == 1 else 1
        outputs = self.m_warps * self.m_tiles * 16
        while row_tiles > 1 and weight.rows % (outputs * row_tiles):
            row_tiles -= 1
        return replace(self, row_tiles=row_tiles)

    def shared_bytes(self, weight: ExpertMatrices) -> int:
        """Return the dynamic shared memory of a block in bytes."""
        columns, rows = self.chunk * self.k_split * BLOCK_COLUMNS, self.m_warps * self.m_tiles * 16
        stage = 8 * self.n_tiles * (columns * 2 + 64) + rows * columns // weight.per_byte
        if weight.codes is Codes.E4M3:
            # Float32, of each half of the rows; the rows of a block need not begin at a scale.
            rows *= self.row_tiles
            rows, row_bytes = 2 * ((rows + weight.row_step - 2) // weight.row_step + 1), 4
        else:
            row_bytes = weight.scales.itemsize + (weight.zeros is not None)
        scale_bytes = rows * weight.scales.shape[1] * row_bytes
        # The last block of columns may be incomplete, but scales of a whole one are read.
        return self.stages * stage + scale_bytes + 16


def supports(weight: ExpertMatrices, *, has_gate: bool) -> bool:
    """Return whether the kernel supports weights; it needs a GPU of the Hopper generation."""
    size = weight.rows // (1 + has_gate)
    return (
        has_wgmma(weight.values.device)
        and _supports_scales(weight, size)
        and weight.orders is None
        and size % (32 if has_gate else 64) == 0  # outputs of a warp with the most tiles of rows
        and weight.experts <= MAX_EXPERTS
    )


def _supports_scales(weight: ExpertMatrices, size: int) -> bool:
    step = COLUMN_STEPS.get(weight.codes, 0)
    if not step:
        return False
    if weight.codes is not Codes.E4M3:
        return weight.column_step == step and weight.row_step == 1 and weight.columns % step == 0
    return (
        (weight.by_row or weight.column_step == step)
        and weight.columns % 16 == 0
        and size % weight.row_step == 0
        and weight.scales.dtype != torch.uint8
    )


def kernel_spec(
    weight: ExpertMatrices, tile: CodedMmaTile, gate: Gate | None, per_row: int, *, biased: bool
) -> KernelSpec:
    """Return the spec of the kernel for weights and a tiling; without a gate, for a down projection."""
    has_gate, is_e4m3 = gate is not None, weight.codes is Codes.E4M3
    tile = tile.fit(weight, has_gate=has_gate)
    definitions = (
        ("CODES", CODE_MACROS[weight.codes]),
        ("SCALE_TYPE", SCALE_MACROS[weight.scales.dtype]),
        ("ROW_STEP", weight.row_step),
        ("BY_ROW", int(is_e4m3 and weight.by_row)),
        ("HAS_ZEROS", int(weight.zeros is not None)),
        ("COLUMNS", weight.columns),
        ("SIZE", weight.rows // (1 + has_gate)),
        ("HELD", weight.experts),
        ("PER_ROW", per_row),
        ("HAS_GATE", int(has_gate)),
        ("PLAIN_INPUTS", int(has_gate and not is_e4m3)),
        ("GATE", -1 if gate is None else gate.number),
        ("HAS_BIAS", int(biased)),
        ("MAX_PAIRS", MAX_PAIRS),
        ("N_TILES", tile.n_tiles),
        ("M_TILES", tile.m_tiles),
        ("M_WARPS", tile.m_warps),
        ("K_SPLIT", tile.k_split),
        ("CHUNK", tile.chunk),
        ("STAGES", tile.stages),
        ("BLOCKS_PER_SM", tile.blocks_per_sm),
        ("ROW_TILES", tile.row_tiles),
    )
    return SOURCE, "coded_mma", definitions


def _launch(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weight: ExpertMatrices,
    tile: CodedMmaTile,
    gate: Gate | None,
    bias: torch.Tensor | None,
    per_row: int,
) -> torch.Tensor:
    has_gate, pairs = gate is not None, chosen.numel()
    if pairs > MAX_PAIRS:
        raise ValueError(f"{pairs} pairs are more than {MAX_PAIRS}")
    tile, size = tile.fit(weight, has_gate=has_gate), weight.rows // (1 + has_gate)
    out = torch.empty(pairs, size, dtype=x.dtype, device=x.device)
    spec = kernel_spec(weight, tile, gate, per_row, biased=bias is not None)
    limit, slope = (0.0, 0.0) if gate is None else (gate.limit, gate.slope)
    launch(
        load_kernel(*spec, x.device.index or 0),
        (-(-size // tile.outputs(has_gate=has_gate)), min(pairs, weight.experts), 1),
        tile.threads,
        (x, chosen, weight.values, weight.scales, weight.zeros, bias, out, pairs, float(limit), float(slope)),
        shared_bytes=tile.shared_bytes(weight),
    )
    return out


def gate_up_coded_mma(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weight: ExpertMatrices,
    gate: Gate,
    tile: CodedMmaTile,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each pair's token by gate and up of its expert; return activation(gate) * up, [pairs, width].

    Except with E4M3, the columns of the result are in the order 0, 4, 1, 5, 2, 6, 3, 7 within each eight.
    Rows of pairs whose experts are outside [0, held) are not written.

    Args:
        x: Inputs, bfloat16 [tokens, hidden] and contiguous.
        chosen: Experts of each token, int64 [tokens, per_token] and contiguous, at most `MAX_PAIRS`.
        weight: Gate rows, then up rows, of each expert; `supports` must accept them.
        gate: Function of gate and up.
        tile: Tiling.
        bias: Biases of the weight's rows, [held, 2 * width].

    Raises:
        ValueError: There are more than `MAX_PAIRS` pairs.
    """
    return _launch(x, chosen, weight, tile, gate, bias, chosen.shape[1])


def down_coded_mma(
    inner: torch.Tensor,
    chosen: torch.Tensor,
    weight: ExpertMatrices,
    tile: CodedMmaTile,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each pair's inner elements by down of its expert; return the outputs [pairs, hidden].

    The kernel must follow `gate_up_coded_mma` directly in the stream: it reads the choice before it waits for
    that kernel. Rows of pairs whose experts are outside [0, held) are not written.

    Args:
        inner: Inner elements [pairs, width], in the order in which `gate_up_coded_mma` returns them.
        chosen: See `gate_up_coded_mma`.
        weight: Down projections; `supports` must accept them.
        tile: Tiling.
        bias: Biases of the outputs, [held, hidden].
    """
    return _launch(inner, chosen, weight, tile, None, bias, 1)
