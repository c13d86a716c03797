"""Which batches of decodes take graphs whose attention cuts contexts by their lengths.

Where one context is far longer than the others, a step whose attention cuts all of them alike waits for that
one alone. Graphs of both kinds exist side by side: those that cut by lengths are of few sizes, to the next of
which a batch is padded, and take a kernel more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mizzen.attention.base import UnevenDecode
from mizzen.core.request import Int32
from mizzen.parallel.collectives import Collectives

SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
FURTHER = 128
"""Beyond, multiples of this are captured."""


def uneven_sizes(sizes: list[int]) -> list[int]:
    """Return the batch sizes that also get a graph which cuts by lengths, out of all (ascending)."""

    def wanted(size: int) -> bool:
        if size > SIZES[-1]:
            return size % FURTHER == 0
        return size in SIZES

    return [size for size in sizes if wanted(size) or SIZES[0] <= size == sizes[-1]]


def same_everywhere(number: int, ranks: Collectives, device: torch.device) -> bool:
    """Tell whether all ranks have the same number; all learn the same. Every rank calls it."""
    if ranks.size == 1:
        return True
    mine = torch.tensor([number, number * number], device=device)
    total, squares = ranks.all_reduce(mine).tolist()
    return total * total == ranks.size * squares


@dataclass(frozen=True, slots=True)
class UnevenGraphs:
    """When a batch takes one of them."""

    backend: UnevenDecode | None
    sizes: list[int]
    """Ascending; none without a backend."""

    @classmethod
    def of(cls, backend: object, sizes: list[int], ranks: Collectives, device: torch.device) -> UnevenGraphs:
        """Return those of a backend, beside plain graphs of these sizes; every rank calls it.

        There are none where ranks would choose differently: a step has the same rows on all of them.
        """
        able = backend if isinstance(backend, UnevenDecode) else None
        slots = able.uneven_slots if able else 0
        if not same_everywhere(slots, ranks, device) or not slots:
            return cls(None, [])
        return cls(able, uneven_sizes(sizes))

    def size_for(self, size: int, lengths: Int32) -> int | None:
        """Return the size of the graph that cuts a batch by its lengths; None where the plain one is to run.

        Args:
            size: The plain graph's.
            lengths: Of the batch's rows.
        """
        if self.backend is None or not self.sizes or not self.backend.uneven(size, lengths):
            return None
        return next((size for size in self.sizes if size >= len(lengths)), None)
