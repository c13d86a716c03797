"""Rows of captured decode steps that are drawn again behind the replay: by filters, by a grammar, or both.

A replay draws every row from its whole vocabulary. Where a request wants less, a kernel or two behind the
replay draw the row anew from the same logits, while the host enqueues the next step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mizzen.core.request import Int32, Int64
from mizzen.engine.execution.slot_state import SlotState, Uploader
from mizzen.engine.sampling.graph_penalties import SlotPenalties
from mizzen.engine.sampling.logits_params import TokenMasks
from mizzen.engine.sampling.sampler import draw, filtered_rows
from mizzen.engine.sampling.slot_params import BatchExtras

NOBODY: Int64 = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What the replays of all sizes write, and where the batch stands on the device."""

    logits: torch.Tensor
    """[largest, vocab]."""
    tokens: torch.Tensor
    """int64 [largest]."""
    slots: torch.Tensor
    """int32 [largest]."""
    positions: torch.Tensor
    """int32 [largest]; a replay advances them to the tokens that it draws."""


class Redraws:
    """Knows which rows of a batch are drawn again, and draws them. Used from one thread, in one stream."""

    def __init__(
        self, replayed: Replayed, state: SlotState, penalties: SlotPenalties, upload: Uploader
    ) -> None:
        from mizzen.kernels.sampling import top_k_top_p

        self.replayed = replayed
        self.state = state
        self.penalties = penalties
        self.upload = upload
        self.kernel = top_k_top_p.serves(replayed.logits.shape[1], replayed.logits.dtype, upload.device)
        """Whether a kernel draws rows with filters; else plain operations do, and nothing else at once."""
        self.filtering: Int64 = NOBODY
        """Rows of the batch with filters."""
        self.within: Int64 = NOBODY
        """Rows that are penalised where they are drawn, by the graph or here, and need no more."""
        self.filtered: Int64 = NOBODY
        """Rows with filters whose logits nothing else processes."""
        self.filtered_index: torch.Tensor | None = None
        """The same on the device, where a kernel draws them."""
        self.masks_alone = False
        """Whether the rows whose logits are to be processed need their masks and nothing else."""
        self.masked: torch.Tensor | None = None
        """Those of them without filters, int64 [n] on the device; None where there are none."""
        self.masked_filtered: torch.Tensor | None = None
        """Those with filters."""

    def begin(self, slots: Int64) -> None:
        """Take note of a batch's slots, and have the graphs penalise it from now on."""
        self.filtering = filtered_rows(self.state, slots)
        self.within = self.penalties.within(slots, NOBODY if self.kernel else self.filtering)
        self.penalties.set(slots, np.setdiff1d(self.within, self.filtering))

    def note(self, extras: BatchExtras | None) -> None:
        """Take note of what the batch's rows ask beyond filters and the penalties of rows `within`."""
        self.filtered, self.masks_alone = self.filtering, False
        if extras is not None:
            both = np.intersect1d(self.filtering, extras.rows)
            self.masks_alone = extras.masks_alone and (self.kernel or not len(both))
            self.filtered = np.setdiff1d(self.filtering, extras.rows)
            if self.masks_alone:
                self.masked = self.on_device(np.setdiff1d(extras.rows, both))
                self.masked_filtered = self.on_device(both)
        self.filtered_index = self.on_device(self.filtered) if self.kernel else None

    def on_device(self, rows: Int64) -> torch.Tensor | None:
        """Upload rows; None where there are none."""
        return self.upload(rows) if len(rows) else None

    def draw_filtered(self, decode: Int32, positions: Int32) -> None:
        """Draw rows with filters, in place of what the replay drew.

        `decode` and `positions` are the batch's slots, and the sequence positions of what it draws.
        """
        if self.filtered_index is not None:
            self.draw_by_filters(self.filtered_index)
        elif len(self.filtered):
            rows = self.filtered
            self.draw_plainly(decode[rows].astype(np.int64), positions[rows].astype(np.int64))

    def draw_plainly(self, slots: Int64, positions: Int64) -> None:
        """Draw rows with filters where there is no kernel that does."""
        replayed = self.replayed
        at, places = self.upload.each(self.filtered, slots)
        drawn = draw(replayed.logits[at], self.state, slots, positions, self.upload)
        replayed.tokens[at] = drawn
        self.state.last_tokens[places] = drawn

    def draw_masked(self, masks: TokenMasks, extras: BatchExtras, positions: Int64) -> None:
        """Draw rows with a grammar behind their masks, where they need nothing else."""
        bits = masks.bits(extras.slots, positions[extras.rows])
        if self.masked is not None:
            self.draw_by_masks(self.masked, bits)
        if self.masked_filtered is not None:
            self.draw_by_filters(self.masked_filtered, bits)
        masks.applied()

    def draw_by_masks(self, rows: torch.Tensor, bits: torch.Tensor) -> None:
        """Draw rows (int64 [n]) from what `bits` allow their slots."""
        from mizzen.kernels.sampling.draw import draw_masked

        replayed, state = self.replayed, self.state
        draw_masked(
            replayed.logits,
            rows,
            replayed.slots,
            replayed.positions,
            state.temperature.device,
            state.seed.device,
            replayed.tokens,
            state.last_tokens,
            bits,
            self.penalties,
        )

    def draw_by_filters(self, rows: torch.Tensor, bits: torch.Tensor | None = None) -> None:
        """Draw rows (int64 [n]) by their filters, from what `bits` allow their slots."""
        from mizzen.kernels.sampling.top_k_top_p import draw_filtered

        replayed, state = self.replayed, self.state
        draw_filtered(
            replayed.logits,
            rows,
            replayed.slots,
            replayed.positions,
            state.drawing,
            replayed.tokens,
            state.last_tokens,
            bits,
            self.penalties,
        )

    def load_kernels(self) -> None:
        """Run what draws on a row of padding: its first run takes long."""
        device, vocab = self.upload.device, self.replayed.logits.shape[1]
        row = torch.zeros(1, dtype=torch.int64, device=device)
        words = -(-vocab // 32)
        bits = torch.full((len(self.state.last_tokens), words), -1, dtype=torch.int32, device=device)
        self.replayed.logits.zero_()
        self.draw_by_masks(row, bits)
        if self.kernel:
            self.draw_by_filters(row)
