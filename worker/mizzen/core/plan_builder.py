# SPDX-License-Identifier: Apache-2.0
"""Builds one `StepPlan`: page writes, slot starts and prefill chunks, within a token budget."""

from __future__ import annotations

import numpy as np
from msgspec import Struct, field

from mizzen.core.decode_batch import DecodeFrame
from mizzen.core.images.planner import ImagePlanner, StepImages
from mizzen.core.kv.manager import KvManager
from mizzen.core.request import Int32, Request
from mizzen.core.sequence import SequenceState
from mizzen.core.side_outputs import slot_options
from mizzen.core.step_plan import PageWrites, PrefillChunk, SlotStart, StepPlan

_NO_WRITES = PageWrites()


class PlanBuilder(Struct):
    """Collects the page writes, slot starts and prefill chunks of one step.

    If a page-table entry is written twice, the later write wins.
    """

    budget: int
    """Number of prompt tokens that may still be added."""
    kv: KvManager
    image_planner: ImagePlanner
    """Encodes images, and knows which embeddings the device keeps."""
    prompt_tokens: int = 0
    """Number of prompt tokens added so far."""
    starts: list[SlotStart] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)
    images: StepImages = field(default_factory=StepImages)
    prefilled: list[SequenceState] = field(default_factory=list)
    """Request of each chunk in `chunks`, in the same order."""
    writes: list[tuple[Int32, Int32, Int32]] = field(default_factory=list)
    """Slots, columns and pages of page-table entries to set, int32 [n] each; do not modify the arrays."""

    def write_pages(self, slot: int, first: int, pages: Int32) -> None:
        """Set the page-table entries of a slot, from column `first` on, to `pages` (int32 [n])."""
        slots, columns = self.kv.table_indices(slot, first, first + len(pages))
        self.writes.append((slots, columns, pages))

    def start_slot(self, sequence: SequenceState) -> None:
        """Add the `SlotStart` that assigns a request's slot on the device."""
        request = sequence.request
        self.starts.append(
            SlotStart(
                slot=sequence.slot,
                length=sequence.computed,
                sampling=request.sampling,
                seed=request.seed,
                output_tokens=len(sequence.tokens) - sequence.prompt_tokens,
                options=slot_options(sequence),
                rotary_offset=request.rotary_offset,
            )
        )

    def can_begin(self, sequence: SequenceState, start: int) -> bool:
        """Return whether a waiting request could make progress from token `start` on.

        It could have at least one token in the step, or a part of the encoding of its image.
        """
        return self.image_planner.can_begin(
            self.images, sequence, start, self.budget, first=not self.prompt_tokens
        )

    def add_chunk(self, sequence: SequenceState) -> None:
        """Add a prefill chunk with as many uncomputed tokens of a request as the budget allows.

        If the next token belongs to an image that cannot be encoded in this step, no chunk is added.
        """
        start, tokens = sequence.computed, sequence.tokens
        known = len(tokens)
        end, images = min(known, start + self.budget), ()
        if sequence.request.images:
            end, encoded = self.image_planner.add_encodings(
                self.images, sequence, start, end, self.budget, first=not self.prompt_tokens
            )
            self.budget = max(self.budget - encoded, end - start)
            self.prompt_tokens += encoded
            if end == start:
                return
            images = self.image_planner.chunk_images(sequence, start, end)
        self.budget -= end - start
        self.prompt_tokens += end - start
        self.chunks.append(
            PrefillChunk(
                slot=sequence.slot,
                start=start,
                tokens=tokens[start:end],
                last=end == known,
                images=images,
                rotary=slice_rotary(sequence.request, start, end),
                pools=sequence.request.pooling is not None,
            )
        )
        self.prefilled.append(sequence)
        sequence.computed = end

    def build(self, step: int, frame: DecodeFrame) -> StepPlan:
        """Return the plan of `step`, whose decode batch is `frame`."""
        return StepPlan(
            step=step,
            decode=frame.slots,
            decode_version=frame.version,
            pages=self._writes(),
            starts=tuple(self.starts),
            prefill=tuple(self.chunks),
            dropped_images=tuple(self.images.dropped),
            encodings=tuple(self.images.encodings),
        )

    def _writes(self) -> PageWrites:
        parts = self.writes
        if not parts:
            return _NO_WRITES
        if len(parts) == 1:
            slots, columns, pages = parts[0]
            return PageWrites(slots if slots.strides[0] else slots.copy(), columns, pages)
        return PageWrites(*map(np.concatenate, zip(*parts, strict=True)))


def slice_rotary(request: Request, start: int, end: int) -> Int32 | None:
    """Return the rotary positions of a request's tokens `start` to `end`, int32 [3, n]; None without any."""
    if request.rotary is None:
        return None
    given = request.rotary[:, start:end]
    after = np.arange(max(start, request.rotary.shape[1]), end, dtype=np.int32) + request.rotary_offset
    return np.concatenate((given, np.broadcast_to(after, (3, len(after)))), axis=1, dtype=np.int32)
