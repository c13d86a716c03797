"""What a step gives beside its tokens: log probabilities and pooled hidden states, on the way to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from mizzen.core.plan import Float32, Side, SlotLogprobs, SlotVector
from mizzen.core.request import Int32
from mizzen.engine.extras import LogprobRows

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
    ids: torch.Tensor
    """int32 [rows, 1 + widest + most asked for by id]."""
    values: torch.Tensor
    """float32, the same shape."""

    def read(self) -> list[SlotLogprobs]:
        """Return each owner's part; the tensors are on the host."""
        ids: Int32 = self.ids.numpy()
        values: Float32 = self.values.numpy()
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
            logprobs=tuple(
                replace(part, ids=copy(part.ids), values=copy(part.values)) for part in self.logprobs
            ),
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


def report(
    asked: LogprobRows, logits: torch.Tensor, processed: torch.Tensor | None, tokens: torch.Tensor
) -> LogprobTensors:
    """Return the log probabilities of the rows that ask for them.

    Args:
        asked: Which rows, and what they ask.
        logits: The model's, [batch, vocab].
        processed: Those of the rows that draw from processed ones.
        tokens: What each row of the batch drew, int64 [batch].
    """
    rows = logits[asked.rows].float()
    if asked.processed is not None and processed is not None:
        into, source = asked.processed
        rows[into] = processed[source]
    ids, values = table(rows, tokens[asked.rows], asked.widest, asked.by_id)
    owners = zip(asked.slots, asked.tops, asked.named, strict=True)
    return LogprobTensors(
        owners=tuple(Owner(slot=slot, rows=1, top=top, named=named) for slot, top, named in owners),
        widest=min(asked.widest, rows.shape[1]),
        ids=ids,
        values=values,
    )


def table(
    logits: torch.Tensor, tokens: torch.Tensor, top: int, by_id: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids int32 and log probabilities float32, [rows, m], of tokens, the most probable, and by id.

    Args:
        logits: float32 [rows, vocab].
        tokens: int64 [rows].
        top: how many of the most probable; equal ones in the order that the device finds them.
        by_id: int64 [rows, n].
    """
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    ids = [tokens[:, None]]
    if top:
        ids.append(torch.topk(logits, min(top, logits.shape[1]), dim=-1).indices)
    if by_id is not None:
        ids.append(by_id)
    columns = torch.cat(ids, dim=-1)
    values = (logits.gather(-1, columns) - total).clamp_(min=FLOOR)
    return columns.int(), values.nan_to_num_(nan=FLOOR)
