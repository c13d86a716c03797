# SPDX-License-Identifier: Apache-2.0
"""Quantized weights of experts, as kernels take them that decode or dequantize weights in registers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mizzen.kernels.experts.codes import KINDS
from mizzen.layers.quantized.canonical import TWO_PER_BYTE, Codes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatrices:
    """Weights [rows, columns] of a projection of all experts of a rank, one below the other.

    Their meaning is that of `mizzen.layers.quantized.canonical.QuantizedWeight`.
    """

    codes: Codes
    values: torch.Tensor
    """uint8 [experts * rows, columns], or two 4-bit codes in a byte [experts * rows, columns / 2]."""
    scales: torch.Tensor
    zeros: torch.Tensor | None
    orders: torch.Tensor | None = None
    """Column of the inputs for each column, int32 [experts, columns]; None if they are equal."""
    rows: int
    """Rows of one expert."""
    columns: int
    row_step: int
    column_step: int

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(self.values) // self.rows

    @property
    def per_byte(self) -> int:
        """Codes in a byte."""
        return 2 if self.codes in TWO_PER_BYTE else 1

    @property
    def parts(self) -> int:
        """Codes in a word of 16 bits, and parts of inputs; see `mizzen.kernels.experts.grouped_coded`."""
        return 2 * self.per_byte

    @property
    def by_row(self) -> bool:
        """Whether all columns of a row share a scale."""
        return self.column_step >= self.columns

    @property
    def decodable(self) -> bool:
        """Whether kernels that decode the codes support them, and the sizes.

        Columns must be in order, and tiles must begin where the columns of a scale begin.
        """
        if self.codes not in KINDS or self.orders is not None:
            return False
        step = self.column_step
        return self.columns % 16 == 0 and (self.by_row or (step >= 16 and not step & (step - 1)))

    @property
    def constants(self) -> dict[str, int | bool]:
        """Constants, about the codes and their scales, of kernels that decode them."""
        return {
            "KIND": KINDS[self.codes],
            "PER_BYTE": self.per_byte,
            "ROW_STEP": self.row_step,
            "STEP": 0 if self.by_row else self.column_step,
            "SCALES": self.scales.shape[1],
            "ZEROS": self.zeros is not None,
        }
