# SPDX-License-Identifier: Apache-2.0
"""Prompt outputs: log probabilities of prompt tokens, embeddings, and logits of labels.

`StepExecutor` calls `PromptOutputs` for prefill chunks of requests with `prompt_logprobs` or `pooling`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mizzen.core.request import Int32, Int64, Pooling
from mizzen.core.step_plan import PrefillChunk, SlotOptions, SlotStart, StepPlan
from mizzen.engine.pooled_vectors import compute_vectors
from mizzen.engine.sampling.logprobs import logprob_table
from mizzen.engine.sampling.side_outputs import (
    DeviceSideOutputs,
    LogprobRequest,
    LogprobTensors,
    PooledVectors,
    pack_logprobs,
)
from mizzen.engine.uploader import Uploader
from mizzen.models.served_model import ServedModel

LOGIT_ROWS = 128
"""Number of rows whose logits are computed at once; the logits of a whole chunk would take gigabytes."""


@dataclass(frozen=True, slots=True)
class PromptOutputRows:
    """Rows of a prefill chunk whose hidden states are needed for prompt outputs; they are consecutive."""

    chunk: PrefillChunk
    options: SlotOptions
    first_row: int
    """Index of the first needed row within the chunk."""
    row_count: int

    @classmethod
    def from_chunk(cls, chunk: PrefillChunk, options: SlotOptions) -> PromptOutputRows | None:
        """Return the rows of a chunk that prompt outputs of its request need, or None if they need no row."""
        size, first = len(chunk.tokens), 0
        if options.pooling is Pooling.LAST:
            return cls(chunk, options, size - 1, 1) if chunk.last else None
        if options.pooling is Pooling.CLS:
            return cls(chunk, options, 0, 1) if chunk.last or not chunk.start else None
        if options.pooling is None:
            # A row's hidden state predicts the next token. The last prompt row is left out, because it
            # predicts the first output token.
            first = max(0, options.prompt_logprobs_from - 1 - chunk.start)
            size = min(size, options.prompt_tokens - 1 - chunk.start)
        return cls(chunk, options, first, size - first) if size > first else None

    @property
    def position(self) -> int:
        """Sequence position of the token that the first row predicts."""
        return self.chunk.start + self.first_row + 1

    @property
    def next_tokens(self) -> Int32:
        """Ids of the prompt tokens that the rows predict, int32 [row_count]."""
        return self.options.tokens[self.position : self.position + self.row_count]


PlacedRows = tuple[PromptOutputRows, int]
"""Rows of a chunk, and the index of the first of them in a tensor of the rows of all chunks."""


class PromptOutputs:
    """Computes the prompt outputs of all slots whose requests have `prompt_logprobs` or `pooling`."""

    def __init__(self, model: ServedModel, upload: Uploader) -> None:
        self.model = model
        self.upload = upload
        self.options_by_slot: dict[int, SlotOptions] = {}
        self.hidden_sums: dict[int, torch.Tensor] = {}
        """For mean pooling, the sum of the hidden states of earlier chunks, and for CLS pooling that of the
        first token, float32 [hidden], by slot."""

    def start_slots(self, starts: tuple[SlotStart, ...]) -> None:
        """Record the options of the requests that start in slots."""
        for start in starts:
            slot, options = start.slot, start.options
            self.hidden_sums.pop(slot, None)
            if options is not None and (options.pooling is not None or options.prompt_logprobs is not None):
                self.options_by_slot[slot] = options
            else:
                self.options_by_slot.pop(slot, None)

    def chunks_to_read(self, plan: StepPlan) -> list[PromptOutputRows]:
        """Return the rows that prompt outputs need, one entry for each chunk of a plan with such rows."""
        if not self.options_by_slot:
            return []
        chunk_options = [(chunk, self.options_by_slot.get(chunk.slot)) for chunk in plan.prefill]
        reads = [
            PromptOutputRows.from_chunk(chunk, options)
            for chunk, options in chunk_options
            if options is not None
        ]
        return [read for read in reads if read is not None]

    def batch_rows(self, plan: StepPlan, reads: list[PromptOutputRows]) -> Int64:
        """Return the indices of the rows of `reads` within a plan's batch, int64 [rows]."""
        sizes = [len(plan.decode), *(len(chunk.tokens) for chunk in plan.prefill)]
        begins = dict(zip((chunk.slot for chunk in plan.prefill), np.cumsum(sizes).tolist(), strict=False))
        runs = [(begins[read.chunk.slot] + read.first_row, read.row_count) for read in reads]
        return np.concatenate([np.arange(begin, begin + count) for begin, count in runs])

    def __call__(
        self, reads: list[PromptOutputRows], states: torch.Tensor, *, are_logits: bool = False
    ) -> DeviceSideOutputs:
        """Compute the prompt outputs of a step.

        Args:
            reads: Result of `chunks_to_read`.
            states: Hidden states [rows, hidden] of the rows that `batch_rows` returns, before the final norm;
                or, if no row is pooled, their logits [rows, vocab].
            are_logits: Whether `states` are logits.
        """
        pooled: list[PlacedRows] = []
        scored: dict[int, list[PlacedRows]] = {}
        begin = 0
        for read in reads:
            top = read.options.prompt_logprobs or 0
            group = scored.setdefault(top, []) if read.options.pooling is None else pooled
            group.append((read, begin))
            begin += read.row_count
        return DeviceSideOutputs(
            logprobs=tuple(
                self.prompt_logprobs(group, states, top, are_logits) for top, group in scored.items()
            ),
            vectors=self.pooled_vectors(pooled, states) if pooled else (),
        )

    def select_blocks(
        self, parts: Sequence[PlacedRows], states: torch.Tensor, size: int
    ) -> Iterable[torch.Tensor]:
        """Return the rows of `parts` in `states` [rows, n] as blocks of at most `size` rows.

        They are views if all parts are adjacent. Otherwise each block is copied only when it is needed,
        because the logits of 256 rows may have 80 MB.
        """
        begin, count = parts[0][1], sum(read.row_count for read, _ in parts)
        last, last_begin = parts[-1]
        if last_begin + last.row_count - begin == count:
            return states[begin : begin + count].split(size)
        indices = np.concatenate([np.arange(begin, begin + read.row_count) for read, begin in parts])
        return (states[block] for block in self.upload(indices).split(size))

    def pooled_vectors(self, parts: Sequence[PlacedRows], states: torch.Tensor) -> tuple[PooledVectors, ...]:
        """Return the embeddings and logits of the prompts whose last chunk is in a step.

        `parts` holds the rows of each prompt in the hidden states [rows, hidden] before the final norm. All
        prompts share the final norm and the layers that follow the pooling.
        """
        counts = [read.row_count for read, _ in parts]
        [rows] = self.select_blocks(parts, states, len(states))
        rows = self.model.norm(rows).float()
        if all(read.options.pooling is Pooling.LAST for read, _ in parts):
            slots = [read.chunk.slot for read, _ in parts]
            return compute_vectors(rows, slots, [read.options for read, _ in parts], self.finish, self.upload)
        pooled = [
            (read.chunk.slot, read.options, vector)
            for (read, _), states in zip(parts, rows.split(counts), strict=True)
            if (vector := self.pool_hidden(read, states)) is not None
        ]
        if not pooled:
            return ()
        slots, options, vectors = zip(*pooled, strict=True)
        return compute_vectors(torch.stack(vectors), slots, options, self.finish, self.upload)

    def finish(self, vectors: torch.Tensor, classify: bool) -> torch.Tensor:
        """Return the logits or embeddings [n, size] of pooled hidden states, float32 [n, hidden]."""
        return self.model.pooled.classify(vectors) if classify else self.model.pooled.embed(vectors)

    def prompt_logprobs(
        self, parts: Sequence[PlacedRows], states: torch.Tensor, top: int, are_logits: bool
    ) -> LogprobTensors:
        """Return log probabilities of the prompt tokens that follow the rows of chunks, as one table.

        `parts` holds the rows of each chunk in `states` (see `__call__`); `top` is the number of most
        probable tokens, which all requests have in common.
        """
        blocks = self.select_blocks(parts, states, LOGIT_ROWS)
        targets = self.upload(np.concatenate([read.next_tokens for read, _ in parts]).astype(np.int64))
        tables = [
            logprob_table((rows if are_logits else self.model.logits(rows)).float(), tokens, top)
            for rows, tokens in zip(blocks, targets.split(LOGIT_ROWS), strict=True)
        ]
        ids, values = (torch.cat(column) for column in zip(*tables, strict=True))
        requests = tuple(
            LogprobRequest(
                slot=read.chunk.slot,
                rows=read.row_count,
                top_logprobs=top,
                token_id_count=0,
                start_position=read.position,
            )
            for read, _ in parts
        )
        return LogprobTensors(
            requests=requests, max_top_logprobs=ids.shape[1] - 1, packed=pack_logprobs(ids, values)
        )

    def pool_hidden(self, read: PromptOutputRows, states: torch.Tensor) -> torch.Tensor | None:
        """Return the pooled hidden state of a prompt, float32 [hidden], or None if its last chunk is still to
        come.

        `states` [read.row_count, hidden] holds the hidden states of the chunk's rows after the final norm.
        """
        chunk, pooling = read.chunk, read.options.pooling
        if pooling is Pooling.LAST:
            return states[0]
        if pooling is Pooling.CLS:
            vector = states[0] if not chunk.start else self.hidden_sums.pop(chunk.slot)
        else:
            vector = states.sum(dim=0)
            if chunk.slot in self.hidden_sums:
                vector = vector + self.hidden_sums.pop(chunk.slot)
        if not chunk.last:
            self.hidden_sums[chunk.slot] = vector.clone()  # `states` is a view of a whole step's states
            return None
        return vector if pooling is Pooling.CLS else vector / (chunk.start + len(chunk.tokens))
