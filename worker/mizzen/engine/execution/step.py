"""One step on the device: plan in, tokens out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mizzen.attention.base import Chunk, DecodeRows, MixedAttention
from mizzen.core.request import Int64
from mizzen.core.step_plan import StepPlan
from mizzen.engine.execution.forward_batch import Layout
from mizzen.engine.execution.prefill_graphs import PrefillGraphs
from mizzen.engine.execution.slot_state import SlotState, Uploader
from mizzen.engine.prompt_outputs import Prompts, Read
from mizzen.engine.sampling.sampler import sample
from mizzen.engine.sampling.side_outputs import DeviceSide
from mizzen.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gives, on the device."""

    tokens: torch.Tensor
    """int64 [samples]."""
    side: DeviceSide | None = None


class Step:
    """Runs plans in order against a model and its slots' state.

    Every operation is enqueued without waiting for the device; the tokens are read by whoever launches.
    """

    def __init__(
        self,
        model: Decoder,
        attention: MixedAttention,
        state: SlotState,
        upload: Uploader,
        *,
        fused: bool = False,
    ) -> None:
        self.model = model
        self.fused = fused
        self.attention = attention
        self.state = state
        self.upload = upload
        self.prompts = Prompts(model, upload)
        self.graphs: PrefillGraphs | None = None
        """Take the place of `forward` for plans that they take and whose prompts nobody looks at."""

    def __call__(self, plan: StepPlan) -> Outcome:
        """Run a plan."""
        state, upload = self.state, self.upload
        state.write_pages(plan.pages)
        if plan.starts:
            state.start(plan.starts)
            self.prompts.start(plan.starts)
        layout = Layout.of(plan, state)
        samples = len(layout.sample_slots)
        if not len(layout.slots):
            return Outcome(state.last_tokens[:0])
        reads = self.prompts.reads(plan)
        if self.graphs is not None and not reads and self.graphs.takes(plan, layout):
            logits, side = self.graphs(plan, layout), None
        else:
            logits, side = self.eagerly(plan, layout, reads)
        state.lengths[plan.decode] += 1
        for chunk in plan.prefill:
            state.lengths[chunk.slot] = chunk.start + len(chunk.tokens)
        if not samples:
            return Outcome(state.last_tokens[:0], side)
        sampled = sample(
            logits, state, layout.sample_slots, layout.sample_positions, upload, fused=self.fused
        )
        state.last_tokens[upload(layout.sample_slots)] = sampled.tokens
        if sampled.logprobs is not None:
            side = (side or DeviceSide()).reporting(sampled.logprobs)
        return Outcome(sampled.tokens, side)

    def eagerly(
        self, plan: StepPlan, layout: Layout, reads: list[Read]
    ) -> tuple[torch.Tensor, DeviceSide | None]:
        """Run the model kernel by kernel; return the logits of the samples, and what was read of prompts."""
        samples = len(layout.sample_slots)
        looked = self.prompts.rows(plan, reads) if reads else None
        hidden = self.forward(plan, layout, self.wanted(layout, looked))
        side = self.prompts(reads, hidden[samples:]) if reads else None
        if not samples:
            return hidden[:0], side
        return self.model.logits(hidden[:samples] if reads else hidden), side

    def sampled(self, plan: StepPlan, tokens: Callable[[], NDArray[Any]]) -> None:
        """Tell the masks where a step's tokens will be, for those that have to follow them."""
        masks = self.state.extras.masks
        if masks is None or not masks.active:
            return
        final = [chunk.slot for chunk in plan.prefill if chunk.last]
        slots = plan.decode.astype(np.int64)
        masks.sampled(np.concatenate([slots, np.array(final, np.int64)]) if final else slots, tokens)

    def wanted(self, layout: Layout, looked: Int64 | None = None) -> torch.Tensor | None:
        """Return the rows whose hidden states yield tokens, then those that are looked at; None wants all."""
        if layout.sample_rows is None:
            return None
        rows = layout.sample_rows if looked is None else np.concatenate([layout.sample_rows, looked])
        # Where no chunk ends in this step one row is carried on for nothing: kernels take no empty batch.
        return self.upload(rows if len(rows) else np.zeros(1, np.int64))

    def forward(self, plan: StepPlan, layout: Layout, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Run the model over the batch; return hidden states [tokens or rows, hidden]."""
        state, upload = self.state, self.upload
        count = len(plan.decode)
        decodes = DecodeRows(
            slots=layout.slots[:count],
            lengths=(layout.positions[:count] + 1).astype(np.int32),
            pages=state.pages,
        )
        chunks = tuple(Chunk(slot=c.slot, start=c.start, count=len(c.tokens)) for c in plan.prefill)
        cells = state.cells(layout.slots, layout.positions, self.attention.kv.page_size)
        slots, positions, cells = upload.each(layout.slots, layout.positions, cells)
        tokens = (state.agreed_tokens() if count else state.last_tokens)[slots[:count]]
        if chunks:
            tokens = torch.cat((tokens, upload(layout.chunk_tokens)))
        return self.model.hidden(tokens, positions, self.attention.plan(cells, decodes, chunks), rows)
