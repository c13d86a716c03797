"""Log probabilities of tokens that rows of a batch draw: who asks for which, and what they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mizzen.core.request import Int64
from mizzen.engine.sampling.logits_params import Upload
from mizzen.engine.sampling.side_outputs import FLOOR, LogprobTensors, Owner, packed


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """Rows of a batch whose log probabilities are reported.

    Their tables on the device are int32 [n, 5]: a row's place among those that report, its row of the logits
    that it draws from, its row of the batch, its slot, and how many of the most probable tokens it asks for.
    """

    owners: tuple[Owner, ...]
    """Of the rows, one each, in their order."""
    widest: int
    """Most probable tokens that any row asks for."""
    by_id: torch.Tensor | None
    """Tokens that rows ask for by id, int64 [rows that report, any] on the device, padded with 0."""
    plain: torch.Tensor | None
    """Those that draw from the model's logits, or are penalised where they are drawn."""
    processed: torch.Tensor | None
    """Those that draw from processed ones."""

    @classmethod
    def of(
        cls, rows: Int64, slots: Int64, tops: Int64, by_id: list[Int64], processed: Int64, upload: Upload
    ) -> LogprobRows:
        """Upload what rows of a batch ask.

        Args:
            rows: Which rows, [n], ascending.
            slots: Their slots.
            tops: How many of the most probable tokens each asks for.
            by_id: Which tokens each asks for.
            processed: The rows that draw from processed logits, ascending, in the order of these.
            upload: Brings arrays to the device.
        """
        wanted = np.stack([np.arange(len(rows)), rows, rows, slots, tops], axis=1).astype(np.int32)
        apart = np.isin(rows, processed)
        wanted[apart, 1] = np.searchsorted(processed, rows[apart])
        table = np.zeros((len(rows), max(map(len, by_id))), np.int64)
        for row, ids in enumerate(by_id):
            table[row, : len(ids)] = ids
        owners = zip(slots.tolist(), tops.tolist(), map(len, by_id), strict=True)
        return cls(
            owners=tuple(Owner(slot=slot, rows=1, top=top, named=named) for slot, top, named in owners),
            widest=int(tops.max()),
            by_id=upload(table) if table.size else None,
            plain=None if apart.all() else upload(wanted[~apart]),
            processed=upload(wanted[apart]) if apart.any() else None,
        )


def report(
    asked: LogprobRows,
    logits: torch.Tensor,
    processed: torch.Tensor | None,
    tokens: torch.Tensor,
    *,
    fused: bool = False,
) -> LogprobTensors:
    """Return the log probabilities of the rows that ask for them.

    Args:
        asked: Which rows, and what they ask.
        logits: The model's, [batch, vocab].
        processed: Those of the rows that draw from processed ones.
        tokens: What each row of the batch drew, int64 [batch].
        fused: In kernels of our own.
    """
    if fused:
        from mizzen.engine.sampling.graph_logprobs import report_fused

        return report_fused(asked, logits, processed, tokens)
    count = len(asked.owners)
    rows = torch.empty((count, logits.shape[1]), dtype=torch.float32, device=logits.device)
    drawn = torch.empty(count, dtype=torch.int64, device=logits.device)
    for source, wanted in ((logits, asked.plain), (processed, asked.processed)):
        if source is not None and wanted is not None:
            place, row, of_batch = wanted[:, :3].long().unbind(1)
            rows[place] = source[row].float()
            drawn[place] = tokens[of_batch]
    widest = min(asked.widest, logits.shape[1])
    parts = table(rows, drawn, widest, asked.by_id)
    return LogprobTensors(owners=asked.owners, widest=widest, packed=packed(*parts))


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
