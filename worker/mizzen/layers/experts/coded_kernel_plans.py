# SPDX-License-Identifier: Apache-2.0
"""Which kernels and tiles multiply a batch by quantized experts, as a table by format."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mizzen.kernels.experts.coded_mma import CodedMmaTile
from mizzen.kernels.experts.coded_wgmma import CodedWgmmaTile
from mizzen.kernels.experts.few_mma import FewMmaTile
from mizzen.kernels.experts.few_rows import FewRowsTile
from mizzen.kernels.experts.grouped_gemm import GroupedTile
from mizzen.kernels.experts.many_rows import ManyRowsTile
from mizzen.layers.experts.kernel_plans import (
    CodedMma,
    CodedWgmma,
    ExpertKernelPlan,
    FewMma,
    FewRows,
    Grouped,
    ManyRows,
)
from mizzen.layers.quantized.canonical import Codes, QuantizedWeight


@dataclass(frozen=True, slots=True)
class CodedFormat:
    """Properties of weights on which the speed of decoding them depends."""

    codes: Codes
    by_row: bool
    """Whether all columns of a row share a scale, in all projections."""


FEW = FewRows(FewRowsTile(4, 1024, 4), FewRowsTile(2, 512, 4))
ROWS_16 = GroupedTile(16, 64, 128, 4, 4, swap=True)
ROWS_16_LARGE = GroupedTile(16, 128, 128, 4, 8, swap=True)
ROWS_16_DEEP = GroupedTile(16, 64, 256, 3, 4, swap=True)
ROWS_32_LARGE = GroupedTile(32, 128, 128, 4, 8, swap=True)
ROWS_32_DEEP = GroupedTile(32, 64, 256, 3, 4, swap=True)
GROUPED_64 = Grouped(GroupedTile(64, 64, 128, 4, 4, swap=True), GroupedTile(64, 128, 128, 3, 8, swap=True))
ROWS_128 = GroupedTile(128, 128, 128, 3, 8, swap=True)
ROWS_128_ORDERED = GroupedTile(128, 128, 128, 3, 8, swap=True, span=4)

FP8_MANY = ManyRows(ManyRowsTile(128, 4))

MMA_FEW = CodedMmaTile(1, 2, 4, 1, 2, 2, 4)
MMA_8 = CodedMmaTile(1, 1, 4, 1, 2, 4, 3)
MMA_8_MORE = CodedMmaTile(1, 1, 4, 1, 2, 2, 5)
MMA_8_LARGE = CodedMmaTile(1, 1, 8, 1, 2, 4, 2)
MMA_16 = CodedMmaTile(2, 2, 4, 1, 2, 2, 4)
MMA_16_LARGE = CodedMmaTile(2, 1, 8, 1, 2, 2, 3)
MMA_32 = CodedMmaTile(4, 2, 8, 1, 1, 3, 2)
MMA_48 = CodedMmaTile(6, 4, 4, 1, 1, 2, 2)

FP8_FEW = FewMma(FewMmaTile(3, 8, 5, 2), FewMmaTile(1, 8, 4, 2))
FP8_8 = CodedMmaTile(1, 1, 4, 1, 2, 2, 4)
FP8_8_DEEP = CodedMmaTile(1, 1, 4, 1, 2, 3, 3)
FP8_16 = CodedMmaTile(2, 1, 4, 1, 2, 2, 4)
FP8_16_TALL = CodedMmaTile(2, 1, 4, 1, 2, 2, 4, row_tiles=4)
FP8_16_LARGE = CodedMmaTile(2, 2, 4, 1, 1, 3, 3)
FP8_32 = CodedMmaTile(4, 2, 8, 1, 1, 2, 2)

CODED_PLANS: dict[CodedFormat, ExpertKernelPlan] = {
    CodedFormat(Codes.UINT4, by_row=False): ExpertKernelPlan(
        few_rows=FEW,
        few_tokens=1,
        grouped=(
            (
                0.25,
                Grouped(
                    GroupedTile(16, 32, 128, 4, 4, swap=False), GroupedTile(16, 128, 256, 3, 8, swap=True)
                ),
            ),
            (11.31, Grouped(ROWS_16_DEEP, ROWS_16)),
            (45.25, Grouped(GroupedTile(32, 64, 128, 4, 4, swap=True), ROWS_32_LARGE)),
            (math.inf, GROUPED_64),
        ),
        library_rows=math.inf,
        library_size=0,
        coded_mma=(
            (0.088, CodedMma(MMA_FEW, MMA_FEW)),
            (0.177, CodedMma(MMA_FEW, MMA_8_MORE)),
            (0.354, CodedMma(MMA_FEW, MMA_FEW)),
            (0.707, CodedMma(MMA_8_MORE, MMA_FEW)),
            (1.41, CodedMma(MMA_FEW, MMA_FEW)),
            (2.83, CodedMma(MMA_8_LARGE, MMA_16)),
            (11.31, CodedMma(MMA_16, MMA_16)),
        ),
    ),
    CodedFormat(Codes.E4M3, by_row=True): ExpertKernelPlan(
        few_rows=FEW,
        few_tokens=1,
        grouped=(
            (0.25, Grouped(ROWS_16, ROWS_16_LARGE)),
            (11.31, Grouped(ROWS_16_DEEP, ROWS_16)),
            (45.25, Grouped(ROWS_32_DEEP, ROWS_32_LARGE)),
            (math.inf, GROUPED_64),
        ),
        library_rows=128,
        library_size=0,
        coded_mma=(
            (0.354, FP8_FEW),
            (0.707, CodedMma(FP8_8, FP8_8)),
            (1.41, CodedMma(FP8_8, FP8_16_LARGE)),
            (2.83, CodedMma(FP8_8_DEEP, CodedMmaTile(1, 1, 8, 1, 1, 4, 2))),
            (5.66, CodedMma(FP8_16, FP8_16_LARGE)),
            (11.31, CodedMma(FP8_16, FP8_32)),
            (16, CodedMma(FP8_32, FP8_32)),
        ),
        many_rows=((22.63, FP8_MANY),),
    ),
    CodedFormat(Codes.E4M3, by_row=False): ExpertKernelPlan(
        few_rows=FEW,
        few_tokens=1,
        grouped=(
            (45.25, Grouped(ROWS_16, ROWS_16)),
            (256, GROUPED_64),
            (math.inf, Grouped(ROWS_128_ORDERED, ROWS_128_ORDERED)),
        ),
        library_rows=math.inf,
        library_size=0,
        coded_mma=(
            (0.354, FP8_FEW),
            (0.707, CodedMma(FP8_8, FP8_16_TALL)),
            (1.41, CodedMma(FP8_8, FP8_16_LARGE)),
            (2.83, CodedMma(FP8_8_DEEP, FP8_16_TALL)),
            (5.66, CodedMma(FP8_16, FP8_16_TALL)),
            (
                11.31,
                CodedMma(CodedMmaTile(4, 1, 8, 1, 1, 3, 2), CodedMmaTile(3, 1, 8, 1, 1, 4, 2, row_tiles=2)),
            ),
            (16, CodedMma(FP8_32, FP8_32)),
        ),
        many_rows=((22.63, FP8_MANY),),
    ),
    CodedFormat(Codes.E2M1, by_row=False): ExpertKernelPlan(
        few_rows=FEW,
        few_tokens=2,
        grouped=(
            (11.31, Grouped(ROWS_16_DEEP, ROWS_16_DEEP)),
            (90.51, Grouped(ROWS_32_DEEP, GroupedTile(32, 128, 256, 3, 8, swap=True))),
            (512, Grouped(ROWS_128, ROWS_128_ORDERED)),
            (math.inf, Grouped(GroupedTile(128, 64, 128, 3, 4, swap=True), ROWS_128_ORDERED)),
        ),
        library_rows=math.inf,
        library_size=0,
        coded_mma=(
            (0.177, CodedMma(MMA_FEW, CodedMmaTile(1, 1, 2, 2, 2, 4, 4))),
            (0.354, CodedMma(MMA_FEW, MMA_8)),
            (0.707, CodedMma(MMA_8, MMA_FEW)),
            (2.83, CodedWgmma(CodedWgmmaTile(1, 3, 6, 2))),
            (11.31, CodedWgmma(CodedWgmmaTile(2, 3, 5, 2))),
            (22.63, CodedWgmma(CodedWgmmaTile(4, 3, 4, 2))),
            (32, CodedWgmma(CodedWgmmaTile(6, 3, 3, 2))),
            (1.41, CodedMma(MMA_8, CodedMmaTile(1, 1, 4, 1, 2, 3, 4))),
            (2.83, CodedMma(MMA_8_LARGE, MMA_FEW)),
            (5.66, CodedMma(CodedMmaTile(3, 1, 8, 1, 2, 3, 2), MMA_16)),
            (11.31, CodedMma(MMA_16_LARGE, MMA_16_LARGE)),
            (22.63, CodedMma(MMA_32, CodedMmaTile(4, 2, 6, 1, 1, 4, 2))),
            (32, CodedMma(MMA_48, MMA_48)),
        ),
    ),
}
"""Plans for GPUs of the Hopper generation, measured on an H100 (docs/benchmarks.md, "Quantized experts").

FP8 by blocks, FP8 by channels and int4 in groups of 128 were measured with the experts of Qwen3-30B-A3B, and
MXFP4 with those of gpt-oss-20b, for 1, 2, 8, 32, 64, 128, 256, 2048 and 8192 tokens, and `coded_mma` for each
power of two from 1 to 256. A finite limit is the geometric mean of two neighbouring measured numbers of rows
per expert, between which the fastest variant changes; the last one of a `coded_mma` that ends with 256 tokens
is the largest number. Tiles of `CodedWgmma` were measured for each power of two from 8 to 256, with 2 to 4
warpgroups; `mma.sync` instead of `wgmma` in the same kernel was at most 1.4 % faster. `many_rows`
of FP8 need a format with FP8 inputs; they were measured for 256, 512, 2048 and 8192 tokens. Without them, FP8
by channels uses the older product from 128 rows per expert on, which multiplies experts of formats that are
not in the table (`make_quantized_product`) as well."""


def find_plan(*weights: QuantizedWeight) -> ExpertKernelPlan | None:
    """Return the plan for an expert's projections; None if their format is not in the table."""
    codes = {each.codes for each in weights}
    by_row = all(each.column_step >= each.columns for each in weights)
    return CODED_PLANS.get(CodedFormat(codes.pop(), by_row)) if len(codes) == 1 else None
