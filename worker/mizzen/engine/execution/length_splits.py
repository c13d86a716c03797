"""Chooses which decode batches use graphs whose attention splits contexts by their lengths.

If one context is far longer than the others, a step whose attention splits all contexts alike waits for
that one. Both kinds of graphs exist side by side: length-aware ones are captured for fewer batch
sizes (a batch is padded to the next one) and need one more kernel. `DecodeGraphs` decides it for each step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mizzen.attention.base import LengthSplitDecode
from mizzen.core.request import Int32
from mizzen.parallel.collectives import Collectives

SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes up to 256 that are captured with length-aware splits."""
LARGE_SIZE_STEP = 128
"""Batch sizes above the largest of SIZES are captured at multiples of this."""


def length_split_sizes(sizes: list[int]) -> list[int]:
    """Return the sizes, out of all captured ones (ascending), that also get a length-aware graph."""

    def wanted(size: int) -> bool:
        if size > SIZES[-1]:
            return size % LARGE_SIZE_STEP == 0
        return size in SIZES

    return [size for size in sizes if wanted(size) or SIZES[0] <= size == sizes[-1]]


def equal_on_all_ranks(number: int, ranks: Collectives, device: torch.device) -> bool:
    """Return whether all ranks hold the same number; collective, every rank gets the same answer."""
    if ranks.size == 1:
        return True
    mine = torch.tensor([number, number * number], device=device)
    total, squares = ranks.all_reduce(mine).tolist()
    return total * total == ranks.size * squares


@dataclass(frozen=True, slots=True)
class LengthSplitGraphs:
    """Decides when a batch uses a length-aware graph."""

    backend: LengthSplitDecode | None
    sizes: list[int]
    """Captured batch sizes, ascending; an empty list if the backend cannot split by length."""

    @classmethod
    def for_backend(
        cls, backend: object, sizes: list[int], ranks: Collectives, device: torch.device
    ) -> LengthSplitGraphs:
        """Return the choice for a backend, alongside plain graphs of `sizes`; every rank calls it.

        If ranks would choose differently, there are no length-aware graphs: all ranks run a step with equal
        rows.
        """
        split_backend = backend if isinstance(backend, LengthSplitDecode) else None
        slots = split_backend.concurrent_splits if split_backend else 0
        if not equal_on_all_ranks(slots, ranks, device) or not slots:
            return cls(None, [])
        return cls(split_backend, length_split_sizes(sizes))

    def size_for(self, size: int, lengths: Int32) -> int | None:
        """Return the size of the length-aware graph to replay; None to replay the plain one.

        Args:
            size: Size of the plain graph.
            lengths: Context lengths of the batch's rows.
        """
        if self.backend is None or not self.sizes or not self.backend.length_splits_are_faster(size, lengths):
            return None
        return next((size for size in self.sizes if size >= len(lengths)), None)
