# SPDX-License-Identifier: Apache-2.0
"""The int32 buffer that describes the batch of a prefill graph, and how a plan's batch is written into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from mizzen.core.request import Int32, Int64
from mizzen.core.step_plan import StepPlan
from mizzen.engine.execution.forward_batch import BatchLayout

ROTARY_AXES = 3
"""Number of rotary positions of a token: time, height and width."""

Array = TypeVar("Array", Int32, torch.Tensor)


class PackedSections(NamedTuple, Generic[Array]):
    """Sections of the buffer, in their order; a model leaves some of them empty."""

    host_tokens: Array
    """Token ids [tokens]; -1 for decodes, whose tokens only the device knows."""
    slots: Array
    """Slot of each token [tokens]."""
    positions: Array
    """Sequence position of each token [tokens]."""
    starts: Array
    """First token of each sequence, and the end of the last one [sequences + 1]."""
    sequence_slots: Array
    """Slot of each sequence [sequences]."""
    lengths: Array
    """Number of tokens of each sequence so far [sequences]."""
    rows: Array
    """Rows whose results are needed [sequences], and -1 behind them."""
    rotary: Array
    """Rotary positions for time, then for height, then for width [3 * tokens]."""
    images: Array
    """Row in the table of images for each token [tokens]; -1 for tokens without an image."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Layout of the int32 buffer that describes the batch of a replay."""

    tokens: int
    """Number of tokens of the graph."""
    sequences: int
    """Maximum number of sequences in a batch, not counting the padding sequence."""
    has_rotary: bool = False
    """Whether tokens have rotary positions that may differ from their sequence positions."""
    has_images: bool = False
    """Whether embeddings of images may replace those of tokens."""

    @property
    def section_sizes(self) -> tuple[int, ...]:
        """Sizes of the `PackedSections` in elements."""
        tokens, sequences = self.tokens, self.sequences + 1
        rotary, images = ROTARY_AXES * tokens * self.has_rotary, tokens * self.has_images
        return (tokens,) * 3 + (sequences + 1, sequences, sequences, self.sequences, rotary, images)

    @property
    def size(self) -> int:
        """Length of the buffer in elements."""
        return sum(self.section_sizes)

    def split(self, numbers: Int32) -> PackedSections[Int32]:
        """Return the sections of a buffer on the host, int32 [size]."""
        return PackedSections(*np.split(numbers, np.cumsum(self.section_sizes)[:-1]))

    def split_tensor(self, inbox: torch.Tensor) -> PackedSections[torch.Tensor]:
        """Return the sections of a buffer on the device, int32 [size]."""
        return PackedSections(*inbox.split(self.section_sizes))

    def make_padding(self, scratch_slot: int) -> Int32:
        """Return the buffer of a batch that consists of padding only, int32 [size]."""
        numbers = np.zeros(self.size, np.int32)
        parts = self.split(numbers)
        parts.slots[:] = parts.sequence_slots[:] = scratch_slot
        parts.starts[1:] = self.tokens
        parts.lengths[:] = 1
        parts.rows[:] = parts.images[:] = -1
        return numbers

    def pack(
        self,
        numbers: Int32,
        plan: StepPlan,
        layout: BatchLayout,
        output_rows: Int64,
        table_rows: Int64 | None,
        scratch_slot: int,
    ) -> None:
        """Write the batch of a plan, and its padding, into a buffer.

        Args:
            numbers: The buffer, int32 [size].
            plan: The plan.
            layout: Layout of its batch.
            output_rows: Indices of the rows whose results are needed, int64 [rows].
            table_rows: Rows in the table of images that replace `layout.image_rows`, int64 [n]; None if the
                batch has no images.
            scratch_slot: Slot of padding.
        """
        parts, chunks = self.split(numbers), plan.prefill
        count, decodes = len(layout.slots), len(plan.decode)
        sequences = decodes + len(chunks)
        parts.host_tokens[:decodes] = -1
        parts.host_tokens[decodes:count] = layout.chunk_tokens
        parts.host_tokens[count:] = 0
        parts.slots[:count], parts.slots[count:] = layout.slots, scratch_slot
        parts.positions[:count], parts.positions[count:] = layout.positions, 0
        starts, lengths, slots = parts.starts, parts.lengths, parts.sequence_slots
        starts[: decodes + 1] = np.arange(decodes + 1)
        starts[decodes + 1 : sequences + 1] = decodes + np.cumsum([len(chunk.tokens) for chunk in chunks])
        starts[sequences + 1 :] = self.tokens
        slots[:decodes], slots[sequences:] = plan.decode, scratch_slot
        slots[decodes:sequences] = [chunk.slot for chunk in chunks]
        lengths[:decodes], lengths[sequences:] = layout.positions[:decodes] + 1, 1
        lengths[decodes:sequences] = [chunk.start + len(chunk.tokens) for chunk in chunks]
        parts.rows[: len(output_rows)], parts.rows[len(output_rows) :] = output_rows, -1
        if self.has_rotary:
            rotary = parts.rotary.reshape(ROTARY_AXES, self.tokens)
            rotary[:, :count] = layout.positions if layout.rotary is None else layout.rotary
            rotary[:, count:] = 0
        if self.has_images:
            parts.images[:] = -1
            if table_rows is not None:
                parts.images[layout.image_rows] = table_rows
