"""A rank's place among the ranks that share a model."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Axis:
    """One named axis of the mesh."""

    rank: int = 0
    size: int = 1

    def part(self, total: int, what: str) -> slice:
        """Return this rank's share of `total` equal things.

        Raises:
            ValueError: they do not divide; the message names `what`.
        """
        if total % self.size:
            raise ValueError(f"{what} ({total}) must be a multiple of the tensor ranks ({self.size})")
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The named axes; further ones (pipeline, experts, data) join `tensor` here."""

    tensor: Axis = field(default_factory=Axis)
