"""What a step gives beside its tokens: log probabilities and pooled hidden states, on the way to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from mizzen.core.request import Int32
from mizzen.core.step_plan import Side, SlotLogprobs, SlotVector

FLOOR = -9999.0
"""Log probability of what cannot be drawn, and the least that is reported."""

Copy = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose some rows of a table of log probabilities are, and what they asked for."""

    slot: int
    rows: int
    top: int
    named: int
    """Tokens asked for by id."""
    start: int | None = None
    """Sequence position of the first row's token, of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobTensors:
    """Log probabilities of tokens: each itself, then the `widest` most probable ones, then those by id."""

    owners: tuple[Owner, ...]
    """In the order of the rows."""
    widest: int
    packed: torch.Tensor
    """int32 [rows, 2, 1 + widest + most asked for by id]: ids, and the bits of float32 values."""

    def read(self) -> list[SlotLogprobs]:
        """Return each owner's part; the tensor is on the host."""
        packed: Int32 = self.packed.numpy()
        ids, values = packed[:, 0], packed.view(np.float32)[:, 1]
        out: list[SlotLogprobs] = []
        row = 0
        for owner in self.owners:
            width = ids.shape[1]
            if owner.top >= self.widest and owner.named == width - 1 - self.widest:
                columns = slice(None)
            elif not owner.named:
                columns = slice(1 + min(owner.top, self.widest))
            else:
                named = range(1 + self.widest, 1 + self.widest + owner.named)
                columns = [*range(1 + min(owner.top, self.widest)), *named]
            part = slice(row, row + owner.rows)
            out.append(SlotLogprobs(owner.slot, ids[part, columns], values[part, columns], owner.start))
            row += owner.rows
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSide:
    """What a step gives beside its tokens, on a device."""

    logprobs: tuple[LogprobTensors, ...] = ()
    slots: tuple[int, ...] = ()
    """Of the vectors."""
    vectors: torch.Tensor | None = None
    """float32 [slots, hidden]."""

    def reporting(self, logprobs: LogprobTensors) -> DeviceSide:
        """Return the same with further log probabilities."""
        return replace(self, logprobs=(*self.logprobs, logprobs))

    def copied(self, copy: Copy) -> DeviceSide:
        """Return the same with every tensor copied."""
        return DeviceSide(
            logprobs=tuple(replace(part, packed=copy(part.packed)) for part in self.logprobs),
            slots=self.slots,
            vectors=None if self.vectors is None else copy(self.vectors),
        )

    def read(self) -> Side:
        """Return it for the scheduler; the tensors are on the host."""
        vectors = () if self.vectors is None else tuple(np.ascontiguousarray(self.vectors.numpy()))
        return Side(
            logprobs=tuple(part for tensors in self.logprobs for part in tensors.read()),
            vectors=tuple(SlotVector(slot, vector) for slot, vector in zip(self.slots, vectors, strict=True)),
        )


def packed(ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ids int32 and values float32, both [rows, m], as `LogprobTensors` holds them."""
    return torch.stack((ids, values.view(torch.int32)), dim=1)
