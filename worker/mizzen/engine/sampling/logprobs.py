# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of sampled tokens: the rows that report them, and their computation.

The sampler calls `compute_logprobs` after sampling. After a decode graph, the same kernels run in a graph
(`mizzen.engine.sampling.graph_logprobs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mizzen.core.request import Int64
from mizzen.engine.sampling.side_outputs import LOGPROB_FLOOR, LogprobRequest, LogprobTensors, pack_logprobs
from mizzen.engine.uploader import Uploader

if TYPE_CHECKING:
    from mizzen.kernels.sampling.sample import LogitsProcessing


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """Batch rows that report log probabilities ("reporting rows").

    A row table is int32 [n, 5] on the device. Its columns: index of the row among the reporting rows, index
    of the row in the logits that it samples from, batch row, slot, number of most probable tokens to report.
    """

    requests: tuple[LogprobRequest, ...]
    """Request of each reporting row, in order."""
    max_top_logprobs: int
    """Largest `top_logprobs` of all requests."""
    token_ids: torch.Tensor | None
    """Token ids that each reporting row requests, int64 [reporting rows, n] on the device, padded with 0."""
    model_rows: torch.Tensor | None
    """Row table of rows that sample from the model's logits, including rows penalized by the kernel."""
    processed_rows: torch.Tensor | None
    """Row table of rows that sample from processed logits."""

    @classmethod
    def upload_rows(
        cls,
        rows: Int64,
        slots: Int64,
        top_logprobs: Int64,
        token_ids: list[Int64],
        processed: Int64,
        upload: Uploader,
    ) -> LogprobRows:
        """Upload the reporting rows of a batch.

        Args:
            rows: Batch rows that report log probabilities, ascending, int64 [n].
            slots: Slot of each row.
            top_logprobs: Number of most probable tokens that each row reports.
            token_ids: Token ids that each row requests.
            processed: Batch rows that sample from processed logits, ascending, in the order of these logits.
            upload: Copies arrays to the device.
        """
        row_table = np.stack([np.arange(len(rows)), rows, rows, slots, top_logprobs], axis=1).astype(np.int32)
        is_processed = np.isin(rows, processed)
        row_table[is_processed, 1] = np.searchsorted(processed, rows[is_processed])
        padded_ids = np.zeros((len(rows), max(map(len, token_ids))), np.int64)
        for row, ids in enumerate(token_ids):
            padded_ids[row, : len(ids)] = ids
        requests = zip(slots.tolist(), top_logprobs.tolist(), map(len, token_ids), strict=True)
        return cls(
            requests=tuple(
                LogprobRequest(slot=slot, rows=1, top_logprobs=top, token_id_count=id_count)
                for slot, top, id_count in requests
            ),
            max_top_logprobs=int(top_logprobs.max()),
            token_ids=upload(padded_ids) if padded_ids.size else None,
            model_rows=None if is_processed.all() else upload(row_table[~is_processed]),
            processed_rows=upload(row_table[is_processed]) if is_processed.any() else None,
        )


def compute_logprobs(
    reported: LogprobRows,
    logits: torch.Tensor,
    processed: torch.Tensor | None,
    tokens: torch.Tensor,
    *,
    fused: bool = False,
) -> LogprobTensors:
    """Compute the log probabilities of the rows that report them.

    Args:
        reported: Reporting rows.
        logits: Logits of the model, [batch, vocab].
        processed: Processed logits, [rows, vocab], of the rows that sample from them; None if no row does.
        tokens: Sampled token of each batch row, int64 [batch].
        fused: Use the kernels of `mizzen.kernels`.
    """
    if fused:
        return compute_logprobs_fused(reported, logits, processed, tokens)
    count = len(reported.requests)
    rows = torch.empty((count, logits.shape[1]), dtype=torch.float32, device=logits.device)
    sampled = torch.empty(count, dtype=torch.int64, device=logits.device)
    for source, row_table in ((logits, reported.model_rows), (processed, reported.processed_rows)):
        if source is not None and row_table is not None:
            index, row, batch_row = row_table[:, :3].long().unbind(1)
            rows[index] = source[row].float()
            sampled[index] = tokens[batch_row]
    max_top = min(reported.max_top_logprobs, logits.shape[1])
    parts = logprob_table(rows, sampled, max_top, reported.token_ids)
    return LogprobTensors(requests=reported.requests, max_top_logprobs=max_top, packed=pack_logprobs(*parts))


def compute_logprobs_fused(
    reported: LogprobRows,
    logits: torch.Tensor,
    processed: torch.Tensor | None,
    tokens: torch.Tensor,
    penalties: LogitsProcessing | None = None,
) -> LogprobTensors:
    """Compute log probabilities with the kernels of `mizzen.kernels`; see `compute_logprobs`.

    `penalties` are applied to rows that sample from the model's logits. Their counts already include the
    sampled tokens; the kernel takes this into account.
    """
    from mizzen.kernels.sampling.logprobs import write_logprobs

    max_top, token_ids = min(reported.max_top_logprobs, logits.shape[1]), reported.token_ids
    columns = 1 + max_top + (0 if token_ids is None else token_ids.shape[1])
    output = torch.empty((len(reported.requests), 2, columns), dtype=torch.int32, device=logits.device)
    if reported.model_rows is not None:
        write_logprobs(logits, reported.model_rows, tokens, output, token_ids, penalties)
    if reported.processed_rows is not None and processed is not None:
        write_logprobs(processed, reported.processed_rows, tokens, output, token_ids)
    return LogprobTensors(requests=reported.requests, max_top_logprobs=max_top, packed=output)


def logprob_table(
    logits: torch.Tensor, tokens: torch.Tensor, top: int, by_id: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids (int32) and log probabilities (float32), both [rows, 1 + top + n].

    The first column is the token itself; then follow the most probable tokens and the tokens in `by_id`.

    Args:
        logits: Logits, float32 [rows, vocab].
        tokens: Token of each row, int64 [rows].
        top: Number of most probable tokens; the order of equally probable tokens depends on the device.
        by_id: Ids of further tokens, int64 [rows, n].
    """
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    ids = [tokens[:, None]]
    if top:
        ids.append(torch.topk(logits, min(top, logits.shape[1]), dim=-1).indices)
    if by_id is not None:
        ids.append(by_id)
    columns = torch.cat(ids, dim=-1)
    values = (logits.gather(-1, columns) - total).clamp_(min=LOGPROB_FLOOR)
    return columns.int(), values.nan_to_num_(nan=LOGPROB_FLOOR)
