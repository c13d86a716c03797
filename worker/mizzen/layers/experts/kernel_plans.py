# SPDX-License-Identifier: Apache-2.0
"""Which kernels and tiles multiply a batch by its experts, as a table by the mean number of rows per expert.

`benchmarks/experts.py` measures the entries of the table, and others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mizzen.kernels.experts.coded_mma import MAX_PAIRS, CodedMmaTile
from mizzen.kernels.experts.coded_wgmma import CodedWgmmaTile
from mizzen.kernels.experts.few_mma import FewMmaTile
from mizzen.kernels.experts.few_rows import FewRowsTile
from mizzen.kernels.experts.grouped_gemm import GroupedTile
from mizzen.kernels.experts.many_rows import ManyRowsTile


@dataclass(frozen=True, slots=True)
class FewRows:
    """The kernels of `mizzen.kernels.experts.few_rows`, with their tiles."""

    gate_up: FewRowsTile
    down: FewRowsTile


@dataclass(frozen=True, slots=True)
class Grouped:
    """The kernels of `mizzen.kernels.experts.grouped_gemm`, with their tiles, which have as many rows."""

    gate_up: GroupedTile
    down: GroupedTile


@dataclass(frozen=True, slots=True)
class CodedMma:
    """The kernel of `mizzen.kernels.experts.coded_mma`, with its tiles."""

    gate_up: CodedMmaTile
    down: CodedMmaTile


@dataclass(frozen=True, slots=True)
class FewMma:
    """The kernels of `mizzen.kernels.experts.few_mma`, with their tiles."""

    gate_up: FewMmaTile
    down: FewMmaTile


@dataclass(frozen=True, slots=True)
class CodedWgmma:
    """The kernel of `mizzen.kernels.experts.coded_wgmma`, with its tiles."""

    tile: CodedWgmmaTile


@dataclass(frozen=True, slots=True)
class ManyRows:
    """The kernel of `mizzen.kernels.experts.many_rows`, with its tile for both products."""

    tile: ManyRowsTile


@dataclass(frozen=True, slots=True)
class Library:
    """The grouped GEMM of PyTorch."""


SmallBatch = CodedMma | FewMma | CodedWgmma
"""Kernels for small batches of quantized experts."""
Variant = FewRows | Grouped | SmallBatch | ManyRows | Library


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of the experts of a layer."""

    experts: int
    """Number of experts of the layer, including those of other ranks."""
    hidden: int
    width: int
    """Inner elements of an expert that this rank holds."""

    @property
    def mean_size(self) -> float:
        """Harmonic mean of hidden size and width.

        It is proportional to the operations of an expert over the elements that it reads and writes.
        """
        return 2 * self.hidden * self.width / (self.hidden + self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernelPlan:
    """Variants by the size of a batch and the sizes of experts."""

    few_rows: FewRows
    few_tokens: int
    """Largest number of tokens that use `few_rows`."""
    grouped: tuple[tuple[float, Grouped], ...]
    """Variants for more tokens, each with the largest mean number of rows per expert for which it is used, in
    ascending order."""
    library_rows: float
    """Mean number of rows per expert from which the library multiplies large experts."""
    library_size: float
    """Smallest `ExpertSizes.mean_size` of large experts. With smaller ones, the library's GEMMs take less
    time than the operations around them."""
    coded_mma: tuple[tuple[float, SmallBatch], ...] = ()
    """Variants of small batches that are used instead of all others, each with the largest mean number of
    rows per expert for which it is used, in ascending order. Later entries with smaller numbers are
    fallbacks, used if an earlier entry does not support the weights."""
    many_rows: tuple[tuple[float, ManyRows], ...] = ()
    """Variants of large batches that are used instead of `grouped` and the library, each with the smallest
    mean number of rows per expert for which it is used, in descending order."""

    def variant(self, tokens: int, per_token: int, sizes: ExpertSizes) -> Variant:
        """Return the variant for a batch, which depends on its size alone, and not on the experts chosen."""
        rows = tokens * per_token / sizes.experts
        if tokens * per_token <= MAX_PAIRS:
            for limit, variant in self.coded_mma:
                if rows <= limit:
                    return variant
        if tokens <= self.few_tokens:
            return self.few_rows
        for limit, many in self.many_rows:
            if rows >= limit:
                return many
        if rows >= self.library_rows and sizes.mean_size >= self.library_size:
            return Library()
        return next(variant for limit, variant in self.grouped if rows <= limit)

    @property
    def variants(self) -> tuple[FewRows | Grouped | SmallBatch | ManyRows, ...]:
        """All variants that may be used, but for the library."""
        return (
            self.few_rows,
            *(variant for _, variant in (*self.coded_mma, *self.grouped)),
            *(variant for _, variant in self.many_rows),
        )


FEW_ROWS = FewRows(FewRowsTile(4, 2048, 4), FewRowsTile(2, 1024, 4))
SMALL = Grouped(GroupedTile(16, 64, 128, 3, 4, swap=True), GroupedTile(16, 128, 128, 3, 4, swap=True))
MEDIUM = Grouped(GroupedTile(32, 64, 64, 5, 4, swap=True), GroupedTile(32, 128, 64, 4, 4, swap=True))
LARGE = Grouped(GroupedTile(64, 64, 64, 4, 4, swap=False), GroupedTile(64, 128, 64, 4, 4, swap=False))
PROMPTS = Grouped(GroupedTile(128, 128, 64, 4, 8, swap=False), GroupedTile(128, 256, 64, 4, 8, swap=False))
HOPPER_PLAN = ExpertKernelPlan(
    few_rows=FEW_ROWS,
    few_tokens=2,
    grouped=((12, SMALL), (24, MEDIUM), (48, LARGE), (math.inf, PROMPTS)),
    library_rows=256,
    library_size=4096,
    many_rows=((90.51, ManyRows(ManyRowsTile(144, 4, cluster=2))), (22.63, ManyRows(ManyRowsTile(144, 4)))),
)
"""Plan for GPUs of the Hopper generation.

On an H100 with the experts of Qwen3-30B-A3B, gpt-oss-20b and Mixtral, it chooses the fastest variant, or one
that took at most 2 % longer, for 1, 8, 32, 64, 128, 512 and 8192 tokens. Limits between these sizes are
estimated; those of `many_rows` are the geometric means of two neighbouring measured numbers of rows per
expert, between which the fastest variant changes. `grouped` and the library multiply large batches if the
kernel of `many_rows` cannot be compiled.
"""
