# SPDX-License-Identifier: Apache-2.0
"""Quantized weights of one projection of all experts, in canonical form and one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mizzen.layers.quantized.canonical import IMPLIED_ZEROS, QuantizedWeight, narrow_scales


@dataclass(slots=True, kw_only=True)
class QuantizedExperts:
    """Weights [rows, columns] of a projection of the experts that a rank holds."""

    weight: QuantizedWeight
    """Rows of all experts [experts * rows, columns]; expert e has the rows from e * rows on. Its row step
    divides `rows`, and it has no order of columns."""
    rows: int
    """Rows of one expert."""
    orders: torch.Tensor | None = None
    """Input column that each column of each expert multiplies, int32 [experts, columns], if they differ."""

    @property
    def count(self) -> int:
        """Number of experts."""
        return self.weight.rows // self.rows

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        orders = self.orders
        return self.weight.size + (0 if orders is None else orders.numel() * orders.element_size())

    def multiply(self, x: torch.Tensor, expert: int, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [tokens, input columns] by the weight of one expert and add a bias [rows], if any.

        The weight is dequantized to the data type of x. The result is [tokens, rows].
        """
        if self.orders is not None:
            x = x.index_select(1, self.orders[expert])
        rows = slice(expert * self.rows, (expert + 1) * self.rows)
        return F.linear(x, self.weight.dequantize(rows).to(x.dtype), bias)


def stack_experts(weights: Sequence[QuantizedWeight]) -> QuantizedExperts | None:
    """Join the weights of all experts, each [rows, columns] with an order of its own.

    Returns:
        The joint weights; None if the experts' orders put scales at different columns.
    """
    first = weights[0]
    steps = {(each.columns, each.column_step, each.row_step) for each in weights}
    if len(steps) > 1 or first.rows % first.row_step:
        return None
    zeros: torch.Tensor | None = None
    if any(each.zeros is not None for each in weights):
        implied = IMPLIED_ZEROS[first.codes]
        zeros = torch.cat(
            [
                torch.full(each.scales.shape, implied, dtype=torch.uint8, device=each.scales.device)
                if each.zeros is None
                else each.zeros
                for each in weights
            ]
        )
    scales = torch.cat([each.scales.float() for each in weights])
    orders: torch.Tensor | None = None
    if any(each.order is not None for each in weights):
        kept = torch.arange(first.columns, dtype=torch.int32, device=scales.device)
        orders = torch.stack([kept if each.order is None else each.order for each in weights])
    joined = QuantizedWeight(
        codes=first.codes,
        values=torch.cat([each.values for each in weights]),
        scales=narrow_scales(scales, torch.bfloat16, torch.float16),
        row_step=first.row_step,
        column_step=first.column_step,
        zeros=zeros,
    )
    return QuantizedExperts(weight=joined, rows=first.rows, orders=orders)
