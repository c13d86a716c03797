# SPDX-License-Identifier: Apache-2.0
"""Resamples rows with filters or a grammar after the replay of a captured decode step.

A replay samples each row from the whole vocabulary. For rows that may only sample from a part of it, one or
two kernels after the replay sample again from the same logits. `DecodeGraphs` owns a `Resampler`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mizzen.core.request import Int32, Int64
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.sampling.graph_penalties import GraphPenalties
from mizzen.engine.sampling.logits_params import BatchLogitsParams, TokenMasks
from mizzen.engine.sampling.sampler import rows_with_filters, sample_random
from mizzen.engine.uploader import Uploader

NO_ROWS: Int64 = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayBuffers:
    """Device buffers of decode graphs; `largest` is the largest captured batch size."""

    logits: torch.Tensor
    """Logits [largest, vocab]."""
    tokens: torch.Tensor
    """Sampled tokens, int64 [largest]."""
    slots: torch.Tensor
    """Slots of the rows, int32 [largest]."""
    positions: torch.Tensor
    """Sequence position of each row's input token, int32 [largest]; after a replay, of its sampled token."""


class Resampler:
    """Finds the rows of a batch that need resampling, and resamples them; used in one thread and stream."""

    def __init__(
        self, replayed: ReplayBuffers, state: SlotState, penalties: GraphPenalties, upload: Uploader
    ) -> None:
        from mizzen.kernels.sampling import top_k_top_p

        self.buffers = replayed
        self.state = state
        self.penalties = penalties
        self.upload = upload
        self.has_filter_kernel = top_k_top_p.supports(
            replayed.logits.shape[1], replayed.logits.dtype, upload.device
        )
        """Whether a kernel samples rows with filters.

        Otherwise eager PyTorch operations sample these rows, and apply neither penalties nor masks."""
        self.rows_with_filters: Int64 = NO_ROWS
        """Batch rows with top-k, top-p or min-p."""
        self.rows_with_graph_penalties: Int64 = NO_ROWS
        """Batch rows whose only processing is penalties, which the graph or the filter kernel applies."""
        self.filtered_rows: Int64 = NO_ROWS
        """Batch rows with filters whose logits need no processing, except penalties that a kernel applies."""
        self.filtered_rows_device: torch.Tensor | None = None
        """`filtered_rows` on the device; None if it is empty or no kernel samples these rows."""
        self.only_masks = False
        """Whether kernels can resample all rows with logits params: each has a grammar and no other params
        except penalties, and a kernel exists for those with filters."""
        self.masked_rows: torch.Tensor | None = None
        """Rows with a grammar and without filters, int64 [n] on the device; None if there is no such row."""
        self.masked_filtered_rows: torch.Tensor | None = None
        """Rows with a grammar and filters, int64 [n] on the device; None if there is no such row."""

    def set_batch(self, slots: Int64) -> None:
        """Find the rows with filters or penalties in a new batch, and set the penalties of the graphs.

        `slots` is the slot of each batch row, int64 [rows].
        """
        self.rows_with_filters = rows_with_filters(self.state, slots)
        self.rows_with_graph_penalties = self.penalties.rows_in_graph(
            slots, NO_ROWS if self.has_filter_kernel else self.rows_with_filters
        )
        self.penalties.set_batch(slots, np.setdiff1d(self.rows_with_graph_penalties, self.rows_with_filters))

    def set_logits_params(self, params: BatchLogitsParams | None) -> None:
        """Record the logits params of the batch, and find the rows that kernels can resample.

        `params` excludes penalties of `rows_with_graph_penalties`; it is None if no row has other params.
        """
        self.filtered_rows, self.only_masks = self.rows_with_filters, False
        if params is not None:
            masked_with_filters = np.intersect1d(self.rows_with_filters, params.rows)
            self.only_masks = params.only_masks and (self.has_filter_kernel or not len(masked_with_filters))
            self.filtered_rows = np.setdiff1d(self.rows_with_filters, params.rows)
            if self.only_masks:
                self.masked_rows = self.upload_rows(np.setdiff1d(params.rows, masked_with_filters))
                self.masked_filtered_rows = self.upload_rows(masked_with_filters)
        self.filtered_rows_device = self.upload_rows(self.filtered_rows) if self.has_filter_kernel else None

    def upload_rows(self, rows: Int64) -> torch.Tensor | None:
        """Upload row indices; return None for an empty array."""
        return self.upload(rows) if len(rows) else None

    def resample_filtered(self, decode: Int32, positions: Int32) -> None:
        """Resample the rows with filters, and replace their tokens.

        Args:
            decode: Slot of each batch row, int32 [rows].
            positions: Sequence position of the token to sample for each row, int32 [rows].
        """
        if self.filtered_rows_device is not None:
            self.launch_filter_kernel(self.filtered_rows_device)
        elif len(self.filtered_rows):
            rows = self.filtered_rows
            self.resample_without_kernel(decode[rows].astype(np.int64), positions[rows].astype(np.int64))

    def resample_without_kernel(self, slots: Int64, positions: Int64) -> None:
        """Resample `filtered_rows` by eager operations.

        Args:
            slots: Slot of each of these rows, int64 [n].
            positions: Sequence position of the token to sample for each row, int64 [n].
        """
        replayed = self.buffers
        rows, slots_device = self.upload.upload_together(self.filtered_rows, slots)
        tokens = sample_random(replayed.logits[rows], self.state, slots, positions, self.upload)
        replayed.tokens[rows] = tokens
        self.state.last_tokens[slots_device] = tokens

    def resample_masked(self, masks: TokenMasks, params: BatchLogitsParams, positions: Int64) -> None:
        """Resample the rows with a grammar from the tokens that it allows; `only_masks` must be true.

        Args:
            masks: Token bitmasks of the grammars.
            params: Logits params of the batch.
            positions: Sequence position of the token to sample for each batch row, int64 [rows].
        """
        bits = masks.update_bitmasks(params.slots, positions[params.rows])
        if self.masked_rows is not None:
            self.launch_masked_kernel(self.masked_rows, bits)
        if self.masked_filtered_rows is not None:
            self.launch_filter_kernel(self.masked_filtered_rows, bits)
        masks.mark_applied()

    def launch_masked_kernel(self, rows: torch.Tensor, bits: torch.Tensor) -> None:
        """Resample `rows` (int64 [n]) from the tokens that their slots' bitmasks allow.

        `bits` is int32 [slots, ceil(vocab / 32)], as returned by `TokenMasks.update_bitmasks`.
        """
        from mizzen.kernels.sampling.sample import sample_masked

        replayed, state = self.buffers, self.state
        sample_masked(
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

    def launch_filter_kernel(self, rows: torch.Tensor, bits: torch.Tensor | None = None) -> None:
        """Resample `rows` (int64 [n]) with their filters, from the tokens that `bits` allow (None: all)."""
        from mizzen.kernels.sampling.top_k_top_p import sample_top_k_top_p

        replayed, state = self.buffers, self.state
        sample_top_k_top_p(
            replayed.logits,
            rows,
            replayed.slots,
            replayed.positions,
            state.sampling_tensors,
            replayed.tokens,
            state.last_tokens,
            bits,
            self.penalties,
        )

    def run_kernels_once(self) -> None:
        """Run the sampling kernels on a padding row, because their first run is slow."""
        device, vocab = self.upload.device, self.buffers.logits.shape[1]
        row = torch.zeros(1, dtype=torch.int64, device=device)
        words = -(-vocab // 32)
        bits = torch.full((len(self.state.last_tokens), words), -1, dtype=torch.int32, device=device)
        self.buffers.logits.zero_()
        self.launch_masked_kernel(row, bits)
        if self.has_filter_kernel:
            self.launch_filter_kernel(row)
