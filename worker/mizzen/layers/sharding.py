"""A rank's place among the ranks that share a model."""

from __future__ import annotations

from dataclasses import dataclass, field

SERVED = (1, 2, 4, 8)
"""Numbers of ranks that errors propose."""


def way_out(total: int) -> str:
    """Say which numbers of ranks share `total` things."""
    return f"use --tensor {' or '.join(str(size) for size in SERVED if not total % size)}"


@dataclass(frozen=True, slots=True)
class Axis:
    """One named axis of the mesh."""

    rank: int = 0
    size: int = 1

    def part(self, total: int, what: str) -> slice:
        """Return this rank's share of `total` equal things.

        Raises:
            ValueError: they do not divide; the message names `what` and the numbers that do.
        """
        if total % self.size:
            raise ValueError(
                f"{what} ({total}) must be a multiple of the tensor ranks ({self.size}): {way_out(total)}"
            )
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def replicated_shard(self, total: int, what: str) -> slice:
        """Return this rank's share of `total` equal things; of fewer than ranks, several share one.

        Raises:
            ValueError: neither number divides the other; the message names `what` and the numbers that do.
        """
        if total >= self.size:
            return self.part(total, what)
        if self.size % total:
            raise ValueError(
                f"{what} ({total}) must divide the tensor ranks ({self.size}), being fewer: {way_out(total)}"
            )
        mine = self.rank // (self.size // total)
        return slice(mine, mine + 1)

    def padded_shard(self, total: int, multiple: int) -> tuple[int, slice]:
        """Return how many of `total` things a rank has room for, and which ones this rank holds.

        The room is the same on all ranks, and a multiple of `multiple` where there are several; the last
        ranks may hold less, or nothing.
        """
        if self.size == 1:
            return total, slice(0, total)
        room = -(-total // (self.size * multiple)) * multiple
        start = min(self.rank * room, total)
        return room, slice(start, min(start + room, total))


@dataclass(frozen=True, slots=True)
class Mesh:
    """The named axes; further ones (pipeline, experts, data) join `tensor` here."""

    tensor: Axis = field(default_factory=Axis)
