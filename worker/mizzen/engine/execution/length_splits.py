# SPDX-License-Identifier: Apache-2.0
"""Selection of decode graphs whose attention splits contexts by their lengths.

If attention splits all contexts into the same number of parts, a context that is far longer than the others
delays the step. Length-aware graphs avoid this, but run one more kernel and are captured for fewer batch
sizes, so batches need more padding. `DecodeGraphs` has both kinds of graphs, and selects one for each step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mizzen.attention.base import LengthSplitDecode
from mizzen.core.request import Int32
from mizzen.parallel.collectives import Collectives

SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes up to 256 for which length-aware graphs are captured."""
LARGE_SIZE_STEP = 128
"""Above the largest of `SIZES`, length-aware graphs are captured for multiples of this batch size."""


def length_split_sizes(sizes: list[int]) -> list[int]:
    """Return the batch sizes, out of `sizes` (ascending), for which to capture length-aware graphs."""

    def wanted(size: int) -> bool:
        if size > SIZES[-1]:
            return size % LARGE_SIZE_STEP == 0
        return size in SIZES

    return [size for size in sizes if wanted(size) or SIZES[0] <= size == sizes[-1]]


def equal_on_all_ranks(number: int, ranks: Collectives, device: torch.device) -> bool:
    """Return whether `number` is equal on all ranks; collective, with the same result on every rank."""
    if ranks.size == 1:
        return True
    local = torch.tensor([number, number * number], device=device)
    total, squares = ranks.all_reduce(local).tolist()
    return total * total == ranks.size * squares


@dataclass(frozen=True, slots=True)
class LengthSplitGraphs:
    """The batch sizes of length-aware graphs, and the choice between them and plain graphs."""

    backend: LengthSplitDecode | None
    """Attention backend that can split by length; None if there are no length-aware graphs."""
    sizes: list[int]
    """Batch sizes of the length-aware graphs, ascending; an empty list if no graph splits by length."""

    @classmethod
    def for_backend(
        cls, backend: object, sizes: list[int], ranks: Collectives, device: torch.device
    ) -> LengthSplitGraphs:
        """Select the batch sizes of length-aware graphs for a backend.

        Collective: every rank must call it. If ranks differ in the number of concurrent splits, no
        length-aware graphs are used, because ranks could choose graphs of different sizes for a step.

        Args:
            backend: The attention backend for decode.
            sizes: Batch sizes of the plain graphs, ascending.
            ranks: Collectives of the tensor parallel ranks.
            device: Device of this rank.
        """
        split_backend = backend if isinstance(backend, LengthSplitDecode) else None
        slots = split_backend.concurrent_splits if split_backend else 0
        if not equal_on_all_ranks(slots, ranks, device) or not slots:
            return cls(None, [])
        return cls(split_backend, length_split_sizes(sizes))

    def size_for(self, size: int, lengths: Int32) -> int | None:
        """Return the batch size of the length-aware graph to replay, or None to replay the plain graph.

        Args:
            size: Batch size of the plain graph.
            lengths: Context length of each row of the batch, in tokens, int32 [rows].
        """
        if self.backend is None or not self.sizes or not self.backend.length_splits_are_faster(size, lengths):
            return None
        return next((size for size in self.sizes if size >= len(lengths)), None)
