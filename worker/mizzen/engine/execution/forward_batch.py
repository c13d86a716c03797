# SPDX-License-Identifier: Apache-2.0
"""Layout of a mixed batch: one row per token of a plan's decodes and prefill chunks.

`StepExecutor` creates a layout per step; eager steps and prefill graphs read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mizzen.core.request import Int64
from mizzen.core.step_plan import PrefillChunk, StepPlan
from mizzen.engine.execution.slot_state import SlotState


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Rows of a mixed batch, one per token: decodes first, then the chunks in plan order."""

    slots: Int64
    """Slot of each row, int64 [rows]."""
    positions: Int64
    """Sequence position of each row's token, int64 [rows]."""
    chunk_tokens: Int64
    """Token ids of all chunks, int64 [tokens]; only the device knows the tokens of decodes."""
    sample_rows: Int64 | None
    """Indices of the rows that sample a token, int64 [samples]; None if all rows do."""
    sample_slots: Int64
    """Slot of each sample, int64 [samples]."""
    sample_positions: Int64
    """Sequence positions of the tokens to sample, int64 [samples]."""

    @classmethod
    def from_plan(cls, plan: StepPlan, state: SlotState) -> BatchLayout:
        """Create the layout of a plan's batch; `plan.starts` must already have been applied to `state`."""
        decode = plan.decode.astype(np.int64)
        lengths = state.lengths[decode].astype(np.int64)
        if not plan.prefill:
            return cls(
                slots=decode,
                positions=lengths,
                chunk_tokens=np.empty(0, np.int64),
                sample_rows=None,
                sample_slots=decode,
                sample_positions=lengths + 1,
            )
        sizes = [len(chunk.tokens) for chunk in plan.prefill]
        ends = len(decode) + np.cumsum(sizes)
        sampled = [i for i, chunk in enumerate(plan.prefill) if chunk.samples]
        final = [plan.prefill[i] for i in sampled]
        final_slots = np.array([chunk.slot for chunk in final], np.int64)
        final_positions = np.array([chunk.start + len(chunk.tokens) for chunk in final], np.int64)
        return cls(
            slots=np.concatenate([decode, np.repeat([chunk.slot for chunk in plan.prefill], sizes)]),
            positions=np.concatenate([lengths, *(chunk_positions(chunk) for chunk in plan.prefill)]),
            chunk_tokens=np.concatenate([chunk.tokens for chunk in plan.prefill]).astype(np.int64),
            sample_rows=np.concatenate([np.arange(len(decode)), ends[sampled] - 1]),
            sample_slots=np.concatenate([decode, final_slots]),
            sample_positions=np.concatenate([lengths + 1, final_positions]),
        )


def chunk_positions(chunk: PrefillChunk) -> Int64:
    """Return the sequence positions of a chunk's tokens, int64 [tokens]."""
    return np.arange(chunk.start, chunk.start + len(chunk.tokens), dtype=np.int64)
