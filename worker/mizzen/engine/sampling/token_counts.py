# SPDX-License-Identifier: Apache-2.0
"""Counts of prompt and output tokens per slot, for frequency, presence and repetition penalties.

`LogitsParamsTable` owns them. Only slots with penalties have a row, of 4 bytes per vocabulary token. Rows are
allocated for the first request with penalties, and their number doubles as more such requests run at once, up
to the number of slots (156 MB for 256 slots and a vocabulary of 152,000 tokens).
"""

from __future__ import annotations

import numpy as np
import torch

from mizzen.core.request import Int32, Int64
from mizzen.engine.uploader import Uploader

PROMPT_BIT = 1 << 30
"""Bit of a count that is set if the prompt contains the token; lower bits count occurrences in the output."""
FIRST_ROWS = 8
"""Number of rows in the first allocation."""


class TokenCounts:
    """Number of occurrences of each token in the output of each slot with penalties; see PROMPT_BIT."""

    def __init__(self, slots: int, vocab: int, upload: Uploader) -> None:
        self.vocab = vocab
        self.upload = upload
        self.row_by_slot: Int64 = np.full(slots, -1, np.int64)
        """Row of each slot, or -1; a slot keeps its row until another request starts in it."""
        self.free_rows: list[int] = []
        """Rows of `table` that no slot has."""
        self.table = torch.empty((0, vocab), dtype=torch.int32, device=upload.device)

    def start_slot(self, slot: int, prompt: Int32, output: Int32) -> None:
        """Count the existing tokens of a request that starts in a slot; the slot must not have a row yet."""
        if not self.free_rows:
            self._grow()
        row_index = self.free_rows.pop()
        self.row_by_slot[slot] = row_index
        row = self.table[row_index]
        row.zero_()
        if len(prompt):
            row.index_fill_(
                0, self.upload(np.unique(prompt).astype(np.int64)), PROMPT_BIT
            )  # `row[...] =` would wait for the device
        if len(output):
            ids, counts = np.unique(output, return_counts=True)
            row[self.upload(ids.astype(np.int64))] += self.upload(counts.astype(np.int32))

    def free_slot(self, slot: int) -> None:
        """Free the row of a slot, if the slot has one."""
        row = self.row_by_slot.item(slot)
        if row >= 0:
            self.free_rows.append(row)
            self.row_by_slot[slot] = -1

    def _grow(self) -> None:
        """Double the number of rows."""
        old_count = len(self.table)
        count = min(max(FIRST_ROWS, 2 * old_count), len(self.row_by_slot))
        table = torch.empty((count, self.vocab), dtype=torch.int32, device=self.upload.device)
        table[:old_count] = self.table
        self.table = table
        self.free_rows += range(count - 1, old_count - 1, -1)

    def count_tokens(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count one token for each row; `rows` (distinct) and `tokens` are int64 [n]."""
        self.table[rows, tokens] += 1
