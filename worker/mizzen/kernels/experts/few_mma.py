# SPDX-License-Identifier: Apache-2.0
"""Products of a few tokens with experts in FP8, limited by the bandwidth at which weights are read.

A warp multiplies 16 weight rows of an expert by some columns of one pair, and shares nothing with others
until its sums are added to theirs. The second kernel starts to load codes while the first still runs, and
adds up the outputs of a token's experts. An expert's codes are loaded for each of its pairs. See
`few_mma.cu`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mizzen.kernels.experts import coded_mma
from mizzen.kernels.experts.coded_mma import BLOCK_COLUMNS, CODE_MACROS, PARTS, SCALE_MACROS
from mizzen.kernels.experts.gate import Gate
from mizzen.kernels.experts.matrices import ExpertMatrices
from mizzen.kernels.nvrtc import KernelSpec, launch, load_kernel, read_source
from mizzen.layers.quantized.canonical import Codes

SOURCE = PARTS + read_source("experts/few_mma")
STAGE_BYTES = 16 * BLOCK_COLUMNS
"""Bytes of a stage of a warp: 16 rows of a block of columns."""
MAX_PART = 8
"""Maximum number of blocks of columns of a warp: each has a column of `mma.sync`'s second operand."""
MAX_WARPS = 32
MAX_SHARED_BYTES = 220 * 1024
"""Maximum dynamic shared memory of a block, besides which it has less than 4 KiB."""


@dataclass(frozen=True, slots=True)
class FewMmaTile:
    """Tiling of a product."""

    m_warps: int
    """Warps of a block with different weight rows of the same expert and the same columns."""
    part: int
    """Maximum number of blocks of 128 columns that a warp multiplies, at most `MAX_PART`."""
    stages: int
    """Blocks of columns of a warp that are in shared memory or on their way there, at least 2."""
    blocks_per_sm: int
    """Blocks per SM for which registers are allocated."""

    def k_split(self, weight: ExpertMatrices) -> int:
        """Return the number of warps with the same weight rows and different columns."""
        return -(-weight.columns // (BLOCK_COLUMNS * self.part))

    def warps(self, weight: ExpertMatrices, experts: int) -> int:
        """Return the warps of a block that multiplies rows of `experts` experts."""
        return self.m_warps * self.k_split(weight) * experts

    def outputs(self, *, has_gate: bool) -> int:
        """Return the outputs of a block; with a gate, each of them has a gate row and an up row."""
        return self.m_warps * (8 if has_gate else 16)

    def shared_bytes(self, weight: ExpertMatrices, experts: int) -> int:
        """Return the dynamic shared memory of a block in bytes; for `experts` see `warps`."""
        part = -(-weight.columns // (BLOCK_COLUMNS * self.k_split(weight)))
        return self.warps(weight, experts) * min(self.stages, part) * STAGE_BYTES

    def fits(self, weight: ExpertMatrices, experts: int) -> bool:
        """Return whether a block has few enough threads and little enough shared memory for a GPU."""
        warps, shared_bytes = self.warps(weight, experts), self.shared_bytes(weight, experts)
        return warps <= MAX_WARPS and shared_bytes <= MAX_SHARED_BYTES


def supports(weight: ExpertMatrices, *, has_gate: bool) -> bool:
    """Return whether the kernel supports weights; it needs a GPU of the Hopper generation."""
    return weight.codes is Codes.E4M3 and coded_mma.supports(weight, has_gate=has_gate)


def kernel_spec(
    weight: ExpertMatrices,
    tile: FewMmaTile,
    gate: Gate | None,
    per_token: int,
    *,
    biased: bool,
    adds: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> KernelSpec:
    """Return the spec of the kernel for weights and a tiling; without a gate, for a down projection.

    Args:
        weight: Weights.
        tile: Tiling.
        gate: Function of gate and up.
        per_token: Experts of a token.
        biased: Whether the outputs have biases.
        adds: Whether a tensor is added to the sums; only without a gate.
        dtype: Data type of the outputs, bfloat16 or, without a gate, float32.
    """
    has_gate = gate is not None
    definitions = (
        ("CODES", CODE_MACROS[weight.codes]),
        ("SCALE_TYPE", SCALE_MACROS[weight.scales.dtype]),
        ("ROW_STEP", weight.row_step),
        ("BY_ROW", int(weight.by_row)),
        ("HAS_ZEROS", 0),
        ("COLUMNS", weight.columns),
        ("SIZE", weight.rows // (1 + has_gate)),
        ("HELD", weight.experts),
        ("PER_TOKEN", per_token),
        ("HAS_GATE", int(has_gate)),
        ("GATE", -1 if gate is None else gate.number),
        ("HAS_BIAS", int(biased)),
        ("HAS_ADDED", int(adds)),
        ("FLOAT_OUTPUT", int(dtype == torch.float32)),
        ("M_WARPS", tile.m_warps),
        ("K_SPLIT", tile.k_split(weight)),
        ("STAGES", tile.stages),
        ("BLOCKS_PER_SM", tile.blocks_per_sm),
    )
    return SOURCE, "few_mma", definitions


def gate_up_few_mma(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weight: ExpertMatrices,
    gate: Gate,
    tile: FewMmaTile,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each pair's token by gate and up of its expert; return activation(gate) * up, [pairs, width].

    Rows of pairs whose experts are outside [0, held) are not written.

    Args:
        x: Inputs, bfloat16 [tokens, hidden] and contiguous.
        chosen: Experts of each token, int64 [tokens, per_token] and contiguous.
        weight: Gate rows, then up rows, of each expert; `supports` must accept them.
        gate: Function of gate and up.
        tile: Tiling, which must fit.
        bias: Biases of the weight's rows, [held, 2 * width].
    """
    (tokens, per_token), size = chosen.shape, weight.rows // 2
    out = torch.empty(tokens * per_token, size, dtype=x.dtype, device=x.device)
    spec = kernel_spec(weight, tile, gate, per_token, biased=bias is not None)
    launch(
        load_kernel(*spec, x.device.index or 0),
        (-(-size // tile.outputs(has_gate=True)), tokens * per_token, 1),
        32 * tile.warps(weight, 1),
        (
            x,
            chosen,
            None,
            weight.values,
            weight.scales,
            bias,
            None,
            out,
            float(gate.limit),
            float(gate.slope),
        ),
        shared_bytes=tile.shared_bytes(weight, 1),
    )
    return out


def down_few_mma(
    inner: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    weight: ExpertMatrices,
    tile: FewMmaTile,
    bias: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply inner elements by down, and return the weighted sum of each token's outputs, [tokens, hidden].

    The outputs are added in float32, in the order of the token's experts, and the sum is rounded once. The
    kernel must follow `gate_up_few_mma` directly in the stream: it reads the choice before it waits for that
    kernel.

    Args:
        inner: Inner elements, bfloat16 [pairs, width].
        chosen: See `gate_up_few_mma`; experts outside [0, held) contribute nothing.
        weights: Factors of the experts' outputs, float32 [tokens, per_token] and contiguous.
        weight: Down projections; `supports` must accept them.
        tile: Tiling, which must fit.
        bias: Biases of the outputs, [held, hidden].
        added: Tensor [tokens, hidden] that is added before the sum is rounded, bfloat16 and contiguous.
        dtype: Data type of the sums, bfloat16 or float32; that of `inner` by default.
    """
    (tokens, per_token), size, dtype = chosen.shape, weight.rows, dtype or inner.dtype
    out = torch.empty(tokens, size, dtype=dtype, device=inner.device)
    adds = added is not None
    spec = kernel_spec(weight, tile, None, per_token, biased=bias is not None, adds=adds, dtype=dtype)
    launch(
        load_kernel(*spec, inner.device.index or 0),
        (-(-size // tile.outputs(has_gate=False)), tokens, 1),
        32 * tile.warps(weight, per_token),
        (inner, chosen, weights, weight.values, weight.scales, bias, added, out, 0.0, 0.0),
        shared_bytes=tile.shared_bytes(weight, per_token),
    )
    return out
