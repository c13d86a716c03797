# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of whole decode steps, from the last tokens of a batch to the newly sampled ones.

The batch (slots, positions, last tokens, page table, sampling parameters) stays on the device, and each
replay advances it by a token. The host sends one packed buffer if the batch changed or pages were added,
otherwise nothing. Batches are padded to the next captured size with rows of the scratch slot. A batch whose
contexts differ greatly in length uses another graph (see `mizzen.engine.execution.length_splits`).

`CudaRunner` replays the graphs for plans without prefill.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import numpy as np
import torch

from mizzen.attention.base import (
    DevicePlannedDecode,
    HostPlannedDecode,
    LengthSplitDecode,
    MixedAttention,
    StepAttention,
)
from mizzen.core.request import Int64
from mizzen.core.step_plan import StepPlan
from mizzen.engine.execution.graph_capture import capture_graph
from mizzen.engine.execution.length_splits import LengthSplitGraphs
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.execution.step import StepResult
from mizzen.engine.sampling.graph_logprobs import LogprobGraphs
from mizzen.engine.sampling.graph_penalties import GraphPenalties
from mizzen.engine.sampling.graph_resample import ReplayBuffers, Resampler
from mizzen.engine.sampling.logits_params import BatchLogitsParams
from mizzen.engine.sampling.sampler import sample_processed_rows
from mizzen.engine.sampling.side_outputs import DeviceSideOutputs
from mizzen.engine.uploader import Uploader
from mizzen.models.served_model import ServedModel

log = logging.getLogger(__name__)

MIN_PAGE_WRITES = 64
"""Minimum capacity of a packed buffer, in page writes."""
BUFFERS = 16
"""Number of packed buffers in pinned memory.

It exceeds the number of steps in flight, so the copy from a buffer is complete before its next use."""


def batch_sizes(largest: int) -> list[int]:
    """Return the batch sizes to capture, up to `largest`; small sizes are closer together.

    Padding costs relatively more at small sizes.
    """
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, largest + 1, 32), largest}
    return sorted(size for size in sizes if size <= largest)


class DecodeGraphs:
    """Captured graphs of decode steps, by batch size; used from one thread and in one stream."""

    def __init__(
        self,
        model: ServedModel,
        attention: MixedAttention,
        state: SlotState,
        upload: Uploader,
        sizes: list[int],
    ) -> None:
        """Allocate the buffers that the graphs of all sizes share.

        Args:
            model: The model.
            attention: Attention backends over the KV cache.
            state: Per-slot device state.
            upload: Copies arrays to the device.
            sizes: Batch sizes to capture, ascending.

        Raises:
            ValueError: The decode backend needs lengths on the host, or `state` has no scratch slot.
        """
        from mizzen.kernels.decode_inputs import InboxLayout

        if not isinstance(attention.decode, DevicePlannedDecode) or state.scratch_slot is None:
            raise ValueError("decode graphs need a backend with lengths on the device, and a scratch slot")
        self.backend: DevicePlannedDecode = attention.decode
        self.refreshed_backend = attention.decode if isinstance(attention.decode, HostPlannedDecode) else None
        self.model = model
        self.kv = attention.kv
        self.state = state
        self.scratch_slot = state.scratch_slot
        self.upload = upload
        self.sizes = sizes
        largest, device = sizes[-1], upload.device
        self.inbox_layout = InboxLayout(writes=max(MIN_PAGE_WRITES, 2 * largest), rows=largest)
        self.blank_inbox = np.zeros(self.inbox_layout.size, np.int32)
        self.blank_inbox[self.inbox_layout.slots] = self.scratch_slot
        pinned = torch.from_numpy(np.tile(self.blank_inbox, (BUFFERS, 1))).pin_memory()
        self.pinned_buffers: Iterator[torch.Tensor] = cycle(pinned.unbind())
        self.inbox = torch.from_numpy(self.blank_inbox).to(device)
        self.logits = state.ranks.allocate_logits_buffer(
            largest, model.config.vocab_size, model.embedding.weight.dtype, device
        )
        self.tokens = torch.zeros(largest, dtype=torch.int64, device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.length_split = LengthSplitGraphs.for_backend(attention.decode, sizes, state.ranks, device)
        self.length_split_graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.decode_version: int | None = None
        """`StepPlan.decode_version` of the batch on the device; None if that batch is stale."""
        self.penalties = GraphPenalties(state.logits_params, self.scratch_slot + 1)
        self.logprobs = LogprobGraphs(self.logits, self.tokens, self.penalties)
        replayed = ReplayBuffers(
            logits=self.logits,
            tokens=self.tokens,
            slots=self.inbox[self.inbox_layout.slots],
            positions=self.inbox[self.inbox_layout.positions],
        )
        self.resampler = Resampler(replayed, state, self.penalties, upload)
        self.logits_params: BatchLogitsParams | None = None
        """Logits params of the batch (biases, bans, penalties, grammars, log probabilities) to apply after a
        replay; None if no row has any. Penalties that the graph or a filter kernel applies are left out."""
        self.logits_params_steps = 0
        """Number of further steps for which `logits_params` stays valid."""

    @property
    def graph_count(self) -> int:
        """Number of decode graphs to capture, including length-aware ones."""
        return len(self.sizes) + len(self.length_split.sizes)

    def enqueue_step(self, size: int, backend: LengthSplitDecode | None = None) -> None:
        """Enqueue a decode step for the batch in `inbox`, the packed buffer on the device.

        The step writes the sampled tokens to `tokens` and the slot state, and advances positions in `inbox`.

        Args:
            size: Batch size.
            backend: Attention backend that splits contexts by their lengths; None for the usual backend.
        """
        from mizzen.kernels.decode_inputs import gather_inputs, write_pages
        from mizzen.kernels.sampling.sample import sample_and_advance

        state, table = self.state, self.state.page_table.device
        write_pages(self.inbox, self.inbox_layout, table)
        slots = self.inbox[self.inbox_layout.slots][:size]
        positions = self.inbox[self.inbox_layout.positions][:size]
        batch = gather_inputs(
            slots, positions, state.synced_last_tokens(), table, self.kv.page_size, self.scratch_slot
        )
        plan = backend.plan_length_splits_on_device if backend else self.backend.plan_decode_on_device
        decode = plan(slots, batch.lengths, table)
        attend = StepAttention(self.kv, batch.slot_mapping, size, decode, None, batch.live)
        rotary = None
        if state.rotary_offsets is not None:
            rotary = batch.positions + state.rotary_offsets.device.index_select(0, slots)
        hidden = self.model.hidden(batch.tokens, batch.positions, attend, rotary=rotary)
        logits = self.model.logits(hidden, self.logits[:size])
        sample_and_advance(
            logits,
            slots,
            positions,
            state.temperature.device,
            state.seed.device,
            self.tokens[:size],
            state.last_tokens,
            self.scratch_slot,
            self.penalties,
        )

    def capture(self, stream: torch.cuda.Stream, captured: Callable[[], None] = lambda: None) -> None:
        """Capture a graph for every size, and call `captured` after each.

        The largest size is captured first, so that all others share its memory.
        """
        start_time = time.perf_counter()
        pool = None
        graph_sets = (
            (self.sizes, None, self.graphs),
            (self.length_split.sizes, self.length_split.backend, self.length_split_graphs),
        )
        with torch.inference_mode(), torch.cuda.stream(stream):
            self.run_kernels_once()
            for sizes, backend, graphs in graph_sets:
                for size in reversed(sizes):
                    graphs[size] = graph = capture_graph(
                        partial(self.enqueue_step, size, backend), stream, pool
                    )
                    pool = pool or graph.pool()
                    captured()
            self.logprobs.capture(stream, pool)
        stream.synchronize()
        seconds = time.perf_counter() - start_time
        log.info("captured %d decode graphs in %.1f s", self.graph_count, seconds)

    def run_kernels_once(self) -> None:
        """Run each kernel that may follow a replay once, on a padding row, because its first run is slow."""
        from mizzen.kernels.sampling.bitmask import mask_tokens

        device, vocab = self.inbox.device, self.logits.shape[1]
        row = torch.zeros(1, dtype=torch.int64, device=device)
        bits = torch.full((1, -(-vocab // 32)), -1, dtype=torch.int32, device=device)
        mask_tokens(torch.zeros((1, vocab), device=device), row, row, bits)
        self.resampler.run_kernels_once()

    def can_run(self, plan: StepPlan) -> bool:
        """Return whether a plan is decode-only and not larger than the largest captured size."""
        return not plan.prefill and 0 < len(plan.decode) <= self.sizes[-1]

    def invalidate_batch(self) -> None:
        """Mark the batch on the device as stale, because a step ran outside the graphs."""
        self.decode_version = None

    def __call__(self, plan: StepPlan) -> StepResult:
        """Enqueue the step of a plan; the result's tokens are valid until the next replay in stream order."""
        state, rows = self.state, len(plan.decode)
        if plan.starts:
            state.start_slots(plan.starts)
            self.invalidate_batch()
        if len(plan.pages.slots) > self.inbox_layout.writes:
            state.write_pages(plan.pages)
            self.send_batch(plan, with_pages=False)
        elif plan.decode_version != self.decode_version or len(plan.pages.slots):
            self.send_batch(plan, with_pages=True)
        size = self.sizes[int(np.searchsorted(self.sizes, rows))]
        lengths = state.lengths[plan.decode] + 1
        if self.refreshed_backend is not None:
            self.refreshed_backend.refresh(size, lengths)
        split_size = self.length_split.size_for(size, lengths)
        graph = self.graphs[size] if split_size is None else self.length_split_graphs[split_size]
        graph.replay()
        state.lengths[plan.decode] = lengths
        tokens = self.tokens[:rows]
        if self.logits_params is not None and not self.logits_params_steps:
            self.gather_logits_params(plan.decode.astype(np.int64), lengths.astype(np.int64))
        self.resampler.resample_filtered(plan.decode, lengths)
        if self.logits_params is None:
            return StepResult(tokens)
        return StepResult(
            tokens, self.resample_and_report(self.logits_params, tokens, lengths.astype(np.int64))
        )

    def send_batch(self, plan: StepPlan, *, with_pages: bool) -> None:
        """Send the batch of a plan to the device in one copy; include its page writes if `with_pages`."""
        buffer, layout, state = next(self.pinned_buffers), self.inbox_layout, self.state
        view, rows = buffer.numpy(), len(plan.decode)
        view[:] = self.blank_inbox
        if with_pages and (count := len(plan.pages.slots)):
            writes, table = plan.pages, state.page_table.host
            table[writes.slots, writes.columns] = writes.pages
            view[0] = count
            table_indices = writes.slots.astype(np.int64) * table.shape[1] + writes.columns
            view[layout.table_indices][:count] = table_indices
            # Send the host table's entries: the device does not order several writes to one entry.
            view[layout.pages][:count] = table[writes.slots, writes.columns]
        view[layout.slots][:rows] = plan.decode
        view[layout.positions][:rows] = state.lengths[plan.decode]
        self.inbox.copy_(buffer, non_blocking=True)
        if plan.decode_version != self.decode_version:
            slots = plan.decode.astype(np.int64)
            self.resampler.set_batch(slots)
            self.gather_logits_params(slots, state.lengths[slots].astype(np.int64) + 1)
            self.decode_version = plan.decode_version

    def gather_logits_params(self, slots: Int64, positions: Int64) -> None:
        """Gather the batch's biases, bans, penalties and grammars that must be applied after a replay.

        Args:
            slots: Slot of each row, [rows].
            positions: Sequence positions of the tokens to sample, [rows].
        """
        self.logits_params = params = self.state.logits_params.gather_batch(
            slots, positions, self.resampler.rows_with_graph_penalties
        )
        self.resampler.set_logits_params(params)
        if params is not None:
            self.logits_params_steps = params.valid_steps

    def resample_and_report(
        self, params: BatchLogitsParams, tokens: torch.Tensor, positions: Int64
    ) -> DeviceSideOutputs | None:
        """Resample the rows whose logits are changed by `params`, and compute log probabilities.

        This work follows the replay in the stream; the host enqueues it while the replay runs.

        Args:
            params: Logits params of the batch.
            tokens: Tokens that the replay sampled, int64 [rows]; updated in place.
            positions: Sequence positions of these tokens, [rows].
        """
        self.logits_params_steps -= 1
        state, processed = self.state, None
        if self.resampler.only_masks and state.logits_params.masks is not None:
            self.resampler.resample_masked(state.logits_params.masks, params, positions)
        elif len(params.rows):
            processed = sample_processed_rows(
                params, self.logits, tokens, state, positions, self.upload, fused=True
            )
            state.last_tokens[params.slots_device] = tokens[params.rows_device]
        if params.logprobs is None:
            return None
        return DeviceSideOutputs(logprobs=(self.logprobs(params.logprobs, processed, tokens),))
