# SPDX-License-Identifier: Apache-2.0
"""Which kernels and tiles multiply a batch by quantized experts: estimates that no GPU has confirmed yet."""

from __future__ import annotations

import math

from mizzen.kernels.experts.few_rows import FewRowsTile
from mizzen.kernels.experts.grouped_gemm import GroupedTile
from mizzen.layers.experts.kernel_plans import ExpertKernelPlan, FewRows, Grouped

FEW_CODED = FewRows(FewRowsTile(4, 2048, 4), FewRowsTile(2, 1024, 4))
SMALL_CODED = Grouped(GroupedTile(16, 64, 128, 4, 4, swap=True), GroupedTile(16, 64, 128, 4, 4, swap=True))
MEDIUM_CODED = Grouped(GroupedTile(32, 64, 128, 4, 4, swap=True), GroupedTile(32, 64, 128, 4, 4, swap=True))
LARGE_CODED = Grouped(GroupedTile(64, 64, 128, 3, 4, swap=False), GroupedTile(64, 128, 128, 3, 4, swap=False))
CODED_PLAN = ExpertKernelPlan(
    few_rows=FEW_CODED,
    few_tokens=2,
    grouped=((12, SMALL_CODED), (24, MEDIUM_CODED), (math.inf, LARGE_CODED)),
    library_rows=64,
    library_size=0,
)
"""Plan for GPUs of the Hopper generation, for all formats."""
