# SPDX-License-Identifier: Apache-2.0
"""Per-slot state on the device, which a step reads in addition to its plan.

Eager steps, graphs and sampling read it. `StepExecutor` and `DecodeGraphs` update it from each plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mizzen.attention.base import PageTable
from mizzen.core.request import Int32, Int64
from mizzen.core.step_plan import PageWrites, SlotStart
from mizzen.engine.sampling.logits_params import LogitsParamsTable
from mizzen.engine.uploader import MirroredArray, Uploader
from mizzen.parallel.collectives import SINGLE_RANK, Collectives

MIN_TEMPERATURE = 1e-6
"""Smaller positive temperatures are raised to this value. Logits divided by it stay finite, and sampling is
in effect greedy."""


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of all slots, [slots] on the device; the arguments of the sampling kernels."""

    temperature: torch.Tensor
    seed: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


class SlotState:
    """Page table, lengths, last tokens and sampling parameters, indexed by slot.

    With a `scratch_page` there is an additional last slot, in which padding rows run. All KV of this slot is
    written to that page, which no request holds.
    """

    def __init__(
        self,
        slots: int,
        columns: int,
        upload: Uploader,
        scratch_page: int | None = None,
        *,
        vocab: int = 0,
        ranks: Collectives = SINGLE_RANK,
        has_rotary_offsets: bool = False,
    ) -> None:
        """Allocate state for `slots` slots with `columns` pages each.

        Args:
            slots: Number of slots for requests.
            columns: Width of the page table: maximum number of pages of a slot.
            upload: Copies arrays to the device.
            scratch_page: Page of the scratch slot; None for no scratch slot.
            vocab: Vocabulary size; only penalties need it.
            ranks: Collectives of the tensor parallel ranks.
            has_rotary_offsets: Whether rotary positions of decoded tokens may differ from their positions.
        """
        self.ranks = ranks
        table = np.zeros((slots, columns), np.int32)
        if scratch_page is not None:
            slots += 1
            table = np.concatenate([table, np.full((1, columns), scratch_page, np.int32)])
        self.scratch_slot = slots - 1 if scratch_page is not None else None
        """Slot of padding rows; None without a scratch page."""
        self.page_table = MirroredArray(table, upload)
        self.lengths: Int32 = np.zeros(slots, np.int32)
        """Number of tokens whose KV exists in each slot, int32 [slots]; only on the host."""
        self.last_tokens = torch.zeros(slots, dtype=torch.int64, device=upload.device)
        self.temperature = MirroredArray(np.ones(slots, np.float32), upload)
        self.top_k = MirroredArray(np.zeros(slots, np.int64), upload)
        self.top_p = MirroredArray(np.ones(slots, np.float32), upload)
        self.min_p = MirroredArray(np.zeros(slots, np.float32), upload)
        self.seed = MirroredArray(np.zeros(slots, np.int64), upload)
        sampling_arrays = (self.temperature, self.seed, self.top_k, self.top_p, self.min_p)
        self.sampling_tensors = SamplingTensors(*(column.device for column in sampling_arrays))
        self.logits_params = LogitsParamsTable(slots, vocab, upload)
        self.rotary_offsets = MirroredArray(np.zeros(slots, np.int64), upload) if has_rotary_offsets else None
        """Differences between the rotary and the sequence positions of decoded tokens, int64 [slots]; None
        if all are 0."""

    def synced_last_tokens(self) -> torch.Tensor:
        """Return the last tokens, int64 [slots], after a broadcast from rank 0, the only rank that samples.

        Every step with decodes calls it once, before it reads the last tokens. Collective.
        """
        self.ranks.broadcast(self.last_tokens)
        return self.last_tokens

    @property
    def pages(self) -> PageTable:
        """The page table on host and device, int32 [slots, columns]."""
        host: Int32 = self.page_table.host  # type: ignore[assignment]
        return PageTable(host=host, device=self.page_table.device)

    def write_pages(self, writes: PageWrites) -> None:
        """Set entries of the page table."""
        if len(writes.slots):
            self.page_table.write((writes.slots, writes.columns), writes.pages)

    def start_slots(self, starts: tuple[SlotStart, ...]) -> None:
        """Assign slots to new or resumed requests, and set their lengths and sampling parameters."""
        if not starts:
            return
        slots = np.array([start.slot for start in starts], np.int64)
        self.lengths[slots] = [start.length for start in starts]
        params = [start.sampling for start in starts]
        # Seeds are unsigned 64-bit numbers; the device keeps the same bits as signed 64-bit numbers.
        seeds = np.array([start.seed % 2**64 for start in starts], np.uint64).view(np.int64)
        temperatures = np.array([p.temperature for p in params], np.float32)
        minimum = np.where(temperatures > 0, MIN_TEMPERATURE, 0).astype(np.float32)
        self.temperature.write((slots,), np.maximum(temperatures, minimum))
        self.top_k.write((slots,), np.array([p.top_k for p in params], np.int64))
        self.top_p.write((slots,), np.array([p.top_p for p in params], np.float32))
        self.min_p.write((slots,), np.array([p.min_p for p in params], np.float32))
        self.seed.write((slots,), seeds)
        self.logits_params.start_slots(starts)
        offsets = [start.rotary_offset for start in starts]
        if self.rotary_offsets is not None:
            self.rotary_offsets.write((slots,), np.array(offsets, np.int64))
        elif any(offsets):
            raise ValueError("the model has one rotary position for each token, and takes no offset of it")

    def decode_rotary(self, slots: Int64, positions: Int64) -> Int64 | None:
        """Return the rotary positions of decodes at `positions` of `slots`, int64 [n] each.

        None if all are equal to the sequence positions.
        """
        if self.rotary_offsets is None:
            return None
        offsets = self.rotary_offsets.host[slots]
        return positions + offsets if offsets.any() else None

    def slot_mapping(self, slots: Int64, positions: Int64, page_size: int) -> Int64:
        """Return the KV cache index of each (slot, position) pair, int64 [n]: page * page_size + offset."""
        pages = self.page_table.host[slots, positions // page_size].astype(np.int64)
        return pages * page_size + positions % page_size
