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
    """Token ids of all chunks, int64 [tokens], 0 where images replace tokens; only the device knows the
    tokens of decodes."""
    sample_rows: Int64 | None
    """Indices of the rows that sample a token, int64 [samples]; None if all rows do."""
    sample_slots: Int64
    """Slot of each sample, int64 [samples]."""
    sample_positions: Int64
    """Sequence positions of the tokens to sample, int64 [samples]."""
    rotary: Int64 | None = None
    """Rotary positions of the rows, int64 [rows], or [3, rows] for time, height and width; None if they are
    `positions`."""
    image_rows: Int64 | None = None
    """Rows whose token embeddings are replaced by those of the chunks' images, in the order of chunks and
    images, int64 [n]; None for none."""

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
                rotary=state.decode_rotary(decode, lengths),
            )
        sizes = np.array([len(chunk.tokens) for chunk in plan.prefill], np.int64)
        ends = len(decode) + np.cumsum(sizes)
        sampled = [i for i, chunk in enumerate(plan.prefill) if chunk.samples]
        final = [plan.prefill[i] for i in sampled]
        final_slots = np.array([chunk.slot for chunk in final], np.int64)
        final_positions = np.array([chunk.start + len(chunk.tokens) for chunk in final], np.int64)
        positions = np.concatenate([lengths, *(chunk_positions(chunk) for chunk in plan.prefill)])
        tokens = np.concatenate([chunk.tokens for chunk in plan.prefill]).astype(np.int64)
        image_rows = find_image_rows(plan, ends - sizes)
        return cls(
            slots=np.concatenate([decode, np.repeat([chunk.slot for chunk in plan.prefill], sizes)]),
            positions=positions,
            chunk_tokens=tokens if image_rows is None else np.maximum(tokens, 0),
            sample_rows=np.concatenate([np.arange(len(decode)), ends[sampled] - 1]),
            sample_slots=np.concatenate([decode, final_slots]),
            sample_positions=np.concatenate([lengths + 1, final_positions]),
            rotary=mixed_rotary(plan, state.decode_rotary(decode, lengths), positions),
            image_rows=image_rows,
        )


def chunk_positions(chunk: PrefillChunk) -> Int64:
    """Return the sequence positions of a chunk's tokens, int64 [tokens]."""
    return np.arange(chunk.start, chunk.start + len(chunk.tokens), dtype=np.int64)


def mixed_rotary(plan: StepPlan, decode_rotary: Int64 | None, positions: Int64) -> Int64 | None:
    """Return the rotary positions of a plan with prefill, as `BatchLayout.rotary` describes them.

    Args:
        plan: The plan.
        decode_rotary: Rotary positions of the decodes, int64 [decodes]; None if they are their positions.
        positions: Sequence positions of all rows, int64 [rows].
    """
    if decode_rotary is None and all(chunk.rotary is None for chunk in plan.prefill):
        return None
    decodes = positions[: len(plan.decode)] if decode_rotary is None else decode_rotary
    parts = [
        np.broadcast_to(chunk_positions(chunk), (3, len(chunk.tokens)))
        if chunk.rotary is None
        else chunk.rotary
        for chunk in plan.prefill
    ]
    return np.concatenate([np.broadcast_to(decodes, (3, len(decodes))), *parts], axis=1).astype(np.int64)


def find_image_rows(plan: StepPlan, begins: Int64) -> Int64 | None:
    """Return the rows that images replace, as `BatchLayout.image_rows` describes them.

    `begins` has the first row of each chunk, int64 [chunks].
    """
    rows = [
        begin + image.offsets
        for begin, chunk in zip(begins, plan.prefill, strict=True)
        for image in chunk.images
    ]
    return np.concatenate(rows).astype(np.int64) if rows else None
