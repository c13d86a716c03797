# SPDX-License-Identifier: Apache-2.0
"""Which kernels and tiles multiply a batch by its experts, as a table by the number of pairs per expert.

The table holds what is expected of Hopper GPUs; `benchmarks/experts.py` measures its entries and others.
"""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.kernels.experts.few_rows import FewRowsTile
from mizzen.kernels.experts.grouped_gemm import GroupedTile


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
class Library:
    """The grouped GEMM of PyTorch."""


Variant = FewRows | Grouped | Library


@dataclass(frozen=True, slots=True)
class ExpertKernelPlan:
    """Variants by the size of a batch."""

    few_rows: FewRows
    few_tokens: int
    """Largest number of tokens that use `few_rows`."""
    grouped: tuple[tuple[int, Variant], ...]
    """Variants for more tokens, each with the largest number of pairs per expert for which it is used, in
    ascending order. Larger batches use the last one."""

    def variant(self, tokens: int, per_token: int, held: int) -> Variant:
        """Return the variant for a batch, which depends on its size alone, and not on the experts chosen."""
        if tokens <= self.few_tokens:
            return self.few_rows
        pairs_per_expert = tokens * per_token / held
        fitting = (variant for limit, variant in self.grouped if pairs_per_expert <= limit)
        return next(fitting, self.grouped[-1][1])

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All variants that may be used."""
        few = (self.few_rows,) if self.few_tokens else ()
        return (*few, *(variant for _, variant in self.grouped))


FEW_ROWS = FewRows(FewRowsTile(4, 2048, 4), FewRowsTile(2, 1024, 4))
SMALL = Grouped(GroupedTile(16, 64, 64, 6, 4, swap=True), GroupedTile(16, 128, 64, 4, 4, swap=True))
MEDIUM = Grouped(GroupedTile(32, 64, 64, 5, 4, swap=True), GroupedTile(32, 128, 64, 4, 4, swap=True))
LARGE = Grouped(GroupedTile(64, 64, 64, 4, 4, swap=False), GroupedTile(64, 128, 64, 4, 4, swap=False))
PROMPTS = Grouped(GroupedTile(128, 128, 64, 4, 8, swap=False), GroupedTile(128, 256, 64, 4, 8, swap=False))
HOPPER_PLAN = ExpertKernelPlan(
    few_rows=FEW_ROWS,
    few_tokens=4,
    grouped=((8, SMALL), (16, MEDIUM), (48, LARGE), (1 << 30, Library())),
)
"""Plan for GPUs of the Hopper generation. It is an expectation: no entry of it has been measured yet."""
