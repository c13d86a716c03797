"""Whole decode steps as captured CUDA graphs: from the last tokens to the next ones, one replay a step.

The batch lives on the device (slots, positions, last tokens, page table, sampling parameters), and every
replay advances it. The host sends one packed buffer when the batch changed or pages were added, and nothing
otherwise. Batches are padded to the next captured size with rows of a slot that no request has. Batches of
very different lengths have graphs of their own (`mizzen.engine.execution.length_splits`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import numpy as np
import torch

from mizzen.attention.base import Attend, DeviceDecode, MixedAttention, RefreshedDecode, UnevenDecode
from mizzen.core.request import Int64
from mizzen.core.step_plan import StepPlan
from mizzen.engine.execution.graph_capture import captured_graph
from mizzen.engine.execution.length_splits import UnevenGraphs
from mizzen.engine.execution.slot_state import SlotState, Uploader
from mizzen.engine.execution.step import Outcome
from mizzen.engine.sampling.graph_logprobs import LogprobGraphs
from mizzen.engine.sampling.graph_penalties import SlotPenalties
from mizzen.engine.sampling.graph_resample import Redraws, Replayed
from mizzen.engine.sampling.sampler import draw_processed
from mizzen.engine.sampling.side_outputs import DeviceSide
from mizzen.engine.sampling.slot_params import BatchExtras
from mizzen.models.decoder import Decoder

log = logging.getLogger(__name__)

MIN_WRITES = 64
"""Page writes that a packed buffer holds at least."""
BUFFERS = 16
"""Packed buffers in pinned memory; more than steps in flight, so that none is written before it was sent."""


def batch_sizes(largest: int) -> list[int]:
    """Return the batch sizes to capture: fine steps where padding would cost most."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, largest + 1, 32), largest}
    return sorted(size for size in sizes if size <= largest)


class DecodeGraphs:
    """Captured decode steps, by batch size. Used from one thread, in one stream."""

    def __init__(
        self, model: Decoder, attention: MixedAttention, state: SlotState, upload: Uploader, sizes: list[int]
    ) -> None:
        """Allocate what all sizes share.

        Raises:
            ValueError: the attention backend needs lengths on the host, or the state has no slot for padding.
        """
        from mizzen.kernels.decode_inputs import Inbox

        if not isinstance(attention.decode, DeviceDecode) or state.scratch is None:
            raise ValueError("decode graphs need a backend with lengths on the device, and a slot of padding")
        self.backend: DeviceDecode = attention.decode
        self.refreshed = attention.decode if isinstance(attention.decode, RefreshedDecode) else None
        self.model = model
        self.kv = attention.kv
        self.state = state
        self.scratch = state.scratch
        self.upload = upload
        self.sizes = sizes
        largest, device = sizes[-1], upload.device
        self.layout = Inbox(writes=max(MIN_WRITES, 2 * largest), rows=largest)
        self.blank = np.zeros(self.layout.size, np.int32)
        self.blank[self.layout.slots] = self.scratch
        pinned = torch.from_numpy(np.tile(self.blank, (BUFFERS, 1))).pin_memory()
        self.buffers: Iterator[torch.Tensor] = cycle(pinned.unbind())
        self.inbox = torch.from_numpy(self.blank).to(device)
        self.logits = state.ranks.room(largest, model.config.vocab_size, model.embedding.weight.dtype, device)
        self.tokens = torch.zeros(largest, dtype=torch.int64, device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.uneven = UnevenGraphs.of(attention.decode, sizes, state.ranks, device)
        self.uneven_graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.version: int | None = None
        """The decode batch that the device holds; None when another kind of step has run since."""
        self.penalties = SlotPenalties(state.extras, self.scratch + 1)
        self.logprobs = LogprobGraphs(self.logits, self.tokens, self.penalties)
        replayed = Replayed(
            logits=self.logits,
            tokens=self.tokens,
            slots=self.inbox[self.layout.slots],
            positions=self.inbox[self.layout.positions],
        )
        self.redraws = Redraws(replayed, state, self.penalties, upload)
        self.extras: BatchExtras | None = None
        """What rows of that batch ask beyond filters and penalties."""
        self.extras_steps = 0
        """For so many steps more that is good."""

    @property
    def count(self) -> int:
        """Graphs of decode steps that are captured."""
        return len(self.sizes) + len(self.uneven.sizes)

    def step(self, size: int, backend: UnevenDecode | None = None) -> None:
        """Enqueue what a replay does: from the inbox and the slots' state to `tokens`, and both advanced.

        With a `backend` for it, contexts are cut by their lengths.
        """
        from mizzen.kernels.decode_inputs import gather_inputs, write_pages
        from mizzen.kernels.sampling.draw import draw_and_advance

        state, table = self.state, self.state.table.device
        write_pages(self.inbox, self.layout, table)
        slots = self.inbox[self.layout.slots][:size]
        positions = self.inbox[self.layout.positions][:size]
        batch = gather_inputs(slots, positions, state.agreed_tokens(), table, self.kv.page_size)
        plan = backend.plan_uneven_on_device if backend else self.backend.plan_decode_on_device
        decode = plan(slots, batch.lengths, table)
        attend = Attend(self.kv, batch.cells, size, decode, None)
        hidden = self.model.hidden(batch.tokens, batch.positions, attend)
        logits = self.model.logits(hidden, self.logits[:size])
        draw_and_advance(
            logits,
            slots,
            positions,
            state.temperature.device,
            state.seed.device,
            self.tokens[:size],
            state.last_tokens,
            self.scratch,
            self.penalties,
        )

    def capture(self, stream: torch.cuda.Stream, captured: Callable[[], None] = lambda: None) -> None:
        """Capture every size, the largest first, so that all share its memory; `captured` is told each."""
        begin = time.perf_counter()
        pool = None
        kinds = (
            (self.sizes, None, self.graphs),
            (self.uneven.sizes, self.uneven.backend, self.uneven_graphs),
        )
        with torch.inference_mode(), torch.cuda.stream(stream):
            self.load_kernels()
            for sizes, backend, graphs in kinds:
                for size in reversed(sizes):
                    graphs[size] = graph = captured_graph(partial(self.step, size, backend), stream, pool)
                    pool = pool or graph.pool()
                    captured()
            self.logprobs.capture(stream, pool)
        stream.synchronize()
        seconds = time.perf_counter() - begin
        log.info("captured %d decode graphs in %.1f s", self.count, seconds)

    def load_kernels(self) -> None:
        """Run what follows a replay now and then, on rows of padding: its first run takes long."""
        from mizzen.kernels.sampling.bitmask import mask_tokens

        device, vocab = self.inbox.device, self.logits.shape[1]
        row = torch.zeros(1, dtype=torch.int64, device=device)
        bits = torch.full((1, -(-vocab // 32)), -1, dtype=torch.int32, device=device)
        mask_tokens(torch.zeros((1, vocab), device=device), row, row, bits)
        self.redraws.load_kernels()

    def takes(self, plan: StepPlan) -> bool:
        """Tell whether a plan is a step of decodes alone, of a size that is captured."""
        return not plan.prefill and 0 < len(plan.decode) <= self.sizes[-1]

    def forget(self) -> None:
        """Note that a step ran outside the graphs, so that the device's batch is no longer true."""
        self.version = None

    def __call__(self, plan: StepPlan) -> Outcome:
        """Run a plan; its tokens are valid until the next replay in stream order."""
        state, rows = self.state, len(plan.decode)
        if plan.starts:
            state.start(plan.starts)
            self.forget()
        if len(plan.pages.slots) > self.layout.writes:
            state.write_pages(plan.pages)
            self.send(plan, with_pages=False)
        elif plan.decode_version != self.version or len(plan.pages.slots):
            self.send(plan, with_pages=True)
        size = self.sizes[int(np.searchsorted(self.sizes, rows))]
        lengths = state.lengths[plan.decode] + 1
        if self.refreshed is not None:
            self.refreshed.refresh(size, lengths)
        uneven = self.uneven.size_for(size, lengths)
        graph = self.graphs[size] if uneven is None else self.uneven_graphs[uneven]
        graph.replay()
        state.lengths[plan.decode] = lengths
        tokens = self.tokens[:rows]
        if self.extras is not None and not self.extras_steps:
            self.gather(plan.decode.astype(np.int64), lengths.astype(np.int64))
        self.redraws.draw_filtered(plan.decode, lengths)
        if self.extras is None:
            return Outcome(tokens)
        return Outcome(tokens, self.finish(self.extras, tokens, lengths.astype(np.int64)))

    def send(self, plan: StepPlan, *, with_pages: bool) -> None:
        """Send the batch, and the plan's page writes, in one copy."""
        buffer, layout, state = next(self.buffers), self.layout, self.state
        view, rows = buffer.numpy(), len(plan.decode)
        view[:] = self.blank
        if with_pages and (count := len(plan.pages.slots)):
            writes, table = plan.pages, state.table.host
            table[writes.slots, writes.columns] = writes.pages
            view[0] = count
            cells = writes.slots.astype(np.int64) * table.shape[1] + writes.columns
            view[layout.cells][:count] = cells
            # Read back, for the device keeps no order between writes to one cell.
            view[layout.pages][:count] = table[writes.slots, writes.columns]
        view[layout.slots][:rows] = plan.decode
        view[layout.positions][:rows] = state.lengths[plan.decode]
        self.inbox.copy_(buffer, non_blocking=True)
        if plan.decode_version != self.version:
            slots = plan.decode.astype(np.int64)
            self.redraws.begin(slots)
            self.gather(slots, state.lengths[slots].astype(np.int64) + 1)
            self.version = plan.decode_version

    def gather(self, slots: Int64, positions: Int64) -> None:
        """Gather what the rows of a batch ask beyond what graphs and kernels do where they draw."""
        self.extras = extras = self.state.extras.batch(slots, positions, self.redraws.within)
        self.redraws.note(extras)
        if extras is not None:
            self.extras_steps = extras.steps

    def finish(self, extras: BatchExtras, tokens: torch.Tensor, positions: Int64) -> DeviceSide | None:
        """Draw once more for rows whose logits are processed, and report log probabilities.

        All of it follows the replay in the stream; the host enqueues it while the replay runs.
        """
        self.extras_steps -= 1
        state, processed = self.state, None
        if self.redraws.masks_alone and state.extras.masks is not None:
            self.redraws.draw_masked(state.extras.masks, extras, positions)
        elif len(extras.rows):
            processed = draw_processed(extras, self.logits, tokens, state, positions, self.upload, fused=True)
            state.last_tokens[extras.slots_index] = tokens[extras.index]
        if extras.logprobs is None:
            return None
        return DeviceSide(logprobs=(self.logprobs(extras.logprobs, processed, tokens),))
