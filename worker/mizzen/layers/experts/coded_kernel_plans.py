# SPDX-License-Identifier: Apache-2.0
"""Which kernels and tiles multiply a batch by quantized experts, as a table by format."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.layers.experts.kernel_plans import ExpertKernelPlan
from mizzen.layers.quantized.canonical import Codes, QuantizedWeight


@dataclass(frozen=True, slots=True)
class CodedFormat:
    """Properties of weights on which the speed of decoding them depends."""

    codes: Codes
    by_row: bool
    """Whether all columns of a row share a scale, in all projections."""


CODED_PLANS: dict[CodedFormat, ExpertKernelPlan] = {}
"""Plans for GPUs of the Hopper generation. It is empty, because no plan has been measured yet: experts of
formats that are not in the table are multiplied by older products (`make_quantized_product`)."""


def find_plan(*weights: QuantizedWeight) -> ExpertKernelPlan | None:
    """Return the plan for an expert's projections; None if their format is not in the table."""
    codes = {each.codes for each in weights}
    by_row = all(each.column_step >= each.columns for each in weights)
    return CODED_PLANS.get(CodedFormat(codes.pop(), by_row)) if len(codes) == 1 else None
