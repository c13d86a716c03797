# SPDX-License-Identifier: Apache-2.0
"""Weights of experts in MXFP4, as gpt-oss stores them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from mizzen.layers.context import BuildContext
from mizzen.layers.experts.quantized_stack import QuantizedExperts
from mizzen.layers.experts.stored_weights import StoredExpertWeights
from mizzen.layers.quantized.canonical import Codes, QuantizedWeight
from mizzen.layers.quantized.dummy_values import fill_integers
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.experts_config import ExpertsConfig
from mizzen.quantization.schemes import MXFP4_BLOCK
from mizzen.weights.checkpoint_files import WeightsError

NAN_EXPONENT = 255
"""Exponent of E8M0 that stands for NaN."""
BIAS = 127
"""Exponent of E8M0 that stands for a scale of 1."""
E2M1_SIZE = 2.93
"""Root of the mean square of E2M1 for random codes."""


class BlockTensors:
    """Codes and exponents of one projection of the experts that a rank holds, as the checkpoint stores them.

    The checkpoint's tensors are `NAME_blocks` [experts, rows, columns / 32, 16] with two codes in a byte, and
    `NAME_scales` [experts, rows, columns / 32].
    """

    def __init__(
        self,
        build: BuildContext,
        name: str,
        shape: tuple[int, int, int],
        held: slice,
        rows: slice,
        columns: slice,
        *,
        interleaved: bool = False,
    ) -> None:
        """Allocate this rank's shard.

        Args:
            build: Settings of the rank.
            name: Name of the tensors, without `_blocks` and `_scales`.
            shape: Experts, rows and columns of the whole projection.
            held: Experts that this rank holds.
            rows: Rows of each expert that this rank holds.
            columns: Columns that this rank holds; an even number of them.
            interleaved: Whether rows of gate and up alternate; in the result, the gate rows come first.
        """
        self.interleaved = interleaved
        self.name, self.shape, self.held, self.rows, self.columns = name, shape, held, rows, columns
        self.blocks = slice(columns.start // MXFP4_BLOCK, -(-columns.stop // MXFP4_BLOCK))
        count, own_rows = held.stop - held.start, rows.stop - rows.start

        def allocate(elements: int) -> torch.Tensor:
            return torch.empty(count, own_rows, elements, dtype=torch.uint8, device=build.device)

        self.codes = allocate((columns.stop - columns.start) // 2)
        self.exponents = allocate(self.blocks.stop - self.blocks.start)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of each held expert's part of the checkpoint's tensors."""
        count, rows, columns = self.shape
        bytes_ = slice(self.columns.start // 2, self.columns.stop // 2)
        blocks = columns // MXFP4_BLOCK
        exponent = BIAS - round(math.log2(E2M1_SIZE * math.sqrt(columns)))
        for index in range(len(self.codes)):
            expert = self.held.start + index
            own = slice(expert, expert + 1)
            yield WeightTarget(
                name=f"{self.name}_blocks",
                dtypes=("U8",),
                shape=(count, rows, columns // 2),
                other_shapes=((count, rows, blocks, MXFP4_BLOCK // 2),),
                shard=(own, self.rows, bytes_),
                destination=self.codes[index : index + 1],
                fill=fill_integers,
            )
            yield WeightTarget(
                name=f"{self.name}_scales",
                dtypes=("U8",),
                shape=(count, rows, blocks),
                shard=(own, self.rows, self.blocks),
                destination=self.exponents[index : index + 1],
                fill=float(exponent),
            )

    def take(self) -> QuantizedExperts:
        """Return the loaded weights in canonical form, which has the codes in the same memory.

        Raises:
            WeightsError: A scale is NaN.
        """
        if (self.exponents == NAN_EXPONENT).any():
            raise WeightsError(
                f"{self.name}_scales contains NaN (exponent {NAN_EXPONENT}): fetch the model again"
            )
        if self.interleaved:
            for tensor in (*self.codes, *self.exponents):
                tensor.copy_(tensor.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1))
        own_columns = self.columns.stop - self.columns.start
        step = math.gcd(MXFP4_BLOCK, own_columns)
        exponents = self.exponents
        if step < MXFP4_BLOCK:  # a shard begins or ends within a block
            columns = torch.arange(self.columns.start, self.columns.stop, step, device=exponents.device)
            exponents = exponents[..., columns // MXFP4_BLOCK - self.blocks.start]
        weight = QuantizedWeight(
            codes=Codes.E2M1,
            values=self.codes.flatten(0, 1),
            scales=exponents.flatten(0, 1),
            column_step=step,
        )
        return QuantizedExperts(weight=weight, rows=self.codes.shape[1])


class Mxfp4ExpertWeights(StoredExpertWeights):
    """Weights of the experts of a layer in MXFP4.

    A shard may begin and end within a block, whose scale both ranks then hold.
    """

    def __init__(self, build: BuildContext, experts: ExpertsConfig, hidden: int, prefix: str) -> None:
        super().__init__(build, experts, hidden, prefix)
        names, width, everything = experts.names, experts.width, slice(0, hidden)
        pairs = slice(2 * self.shard.start, 2 * self.shard.stop)
        gate_up, down = (experts.count, 2 * width, hidden), (experts.count, hidden, width)
        self._stored = {
            "gate_up": BlockTensors(
                build, prefix + names.stacked_gate_up, gate_up, self.held, pairs, everything, interleaved=True
            ),
            "down": BlockTensors(build, prefix + names.stacked_down, down, self.held, everything, self.shard),
        }
