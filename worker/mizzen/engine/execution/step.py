# SPDX-License-Identifier: Apache-2.0
"""Executes a step on the device, from a plan to sampled tokens.

Runners call it, except for decode-only steps that are replays of a CUDA graph. Plans must run in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mizzen.attention.base import DecodeRows, MixedAttention, QueryChunk
from mizzen.core.request import Int64
from mizzen.core.step_plan import StepPlan
from mizzen.engine.execution.forward_batch import BatchLayout
from mizzen.engine.execution.image_store import ImageStore
from mizzen.engine.execution.prefill_graphs import PrefillGraphs
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.prompt_outputs import PromptOutputRows, PromptOutputs
from mizzen.engine.sampling.sampler import sample
from mizzen.engine.sampling.side_outputs import DeviceSideOutputs
from mizzen.engine.uploader import Uploader
from mizzen.models.served_model import ServedModel


def needed_rows(layout: BatchLayout, read_rows: Int64 | None) -> Int64 | None:
    """Return the indices of the rows to sample and then of `read_rows`, int64 [n]; None for all rows.

    `read_rows` (int64 [rows], or None for none) are the rows that prompt outputs need.
    """
    if layout.sample_rows is None or read_rows is None:
        return layout.sample_rows
    return np.concatenate([layout.sample_rows, read_rows])


def computes_results(graphs: PrefillGraphs, samples: int, reads: list[PromptOutputRows]) -> bool:
    """Return whether graphs compute what a step needs: either logits or, to pool them, hidden states.

    `samples` is the number of tokens to sample, and `reads` are the rows that prompt outputs need.
    """
    if graphs.pools:
        return not samples
    return all(read.options.pooling is None for read in reads)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outputs of a step, on the device."""

    tokens: torch.Tensor
    """Sampled tokens, int64 [samples]."""
    side_outputs: DeviceSideOutputs | None = None


class StepGraphs(Protocol):
    """Graphs of forward passes; `PrefillGraphs` documents the members."""

    @property
    def graph_count(self) -> int:
        """The number of graphs that `capture` captures."""
        ...

    def capture(
        self,
        stream: torch.cuda.Stream,
        captured: Callable[[], None] = ...,
        pool: tuple[int, int] | None = None,
    ) -> None:
        """Capture all graphs, and call `captured` after each."""
        ...


class Executor(Protocol):
    """Interface by which runners execute steps; `StepExecutor` documents the methods."""

    @property
    def prefill_graphs(self) -> StepGraphs | None:
        """Graphs of steps with prefill, which the runner captures; None for none."""
        ...

    def __call__(self, plan: StepPlan) -> StepResult:
        """Enqueue the step of a plan."""
        ...

    def prepare_replay(self, plan: StepPlan) -> None:
        """Do what a step as a replay of a decode graph leaves out; `__call__` does it too.

        The options for prompt outputs of requests that start are recorded, and embeddings of images are
        dropped and computed.
        """
        ...

    def drop_graphs(self) -> None:
        """Drop the graphs."""
        ...

    def defer_grammar_update(self, plan: StepPlan, tokens: Callable[[], NDArray[Any]]) -> None:
        """Register a launched step, so that grammars advance by its tokens once they are known."""
        ...


class StepExecutor:
    """Runs plans, in order, with a model and its per-slot state.

    Operations are enqueued without waiting for the device; the runner waits for the tokens.
    """

    def __init__(
        self,
        model: ServedModel,
        attention: MixedAttention,
        state: SlotState,
        upload: Uploader,
        *,
        fused: bool = False,
        images: ImageStore | None = None,
    ) -> None:
        self.model = model
        self.fused = fused
        self.attention = attention
        self.state = state
        self.upload = upload
        self.prompt_outputs = PromptOutputs(model, upload)
        self.prefill_graphs: PrefillGraphs | None = None
        """Graphs that replace the eager forward pass of plans that fit."""
        self.images = images
        """Embeddings of images; None for a model that takes no images."""

    def __call__(self, plan: StepPlan) -> StepResult:
        """Enqueue the step of a plan: update the slot state, run the model, sample."""
        state, upload = self.state, self.upload
        state.write_pages(plan.pages)
        if plan.starts:
            state.start_slots(plan.starts)
        self.prepare_replay(plan)
        layout = BatchLayout.from_plan(plan, state)
        samples = len(layout.sample_slots)
        if not len(layout.slots):
            return StepResult(state.last_tokens[:0])
        logits, side_outputs = self.run_model(plan, layout)
        state.lengths[plan.decode] += 1
        for chunk in plan.prefill:
            state.lengths[chunk.slot] = chunk.start + len(chunk.tokens)
        if not samples:
            return StepResult(state.last_tokens[:0], side_outputs)
        sampled = sample(
            logits, state, layout.sample_slots, layout.sample_positions, upload, fused=self.fused
        )
        state.last_tokens[upload(layout.sample_slots)] = sampled.tokens
        if sampled.logprobs is not None:
            side_outputs = (side_outputs or DeviceSideOutputs()).with_logprobs(sampled.logprobs)
        return StepResult(sampled.tokens, side_outputs)

    def prepare_replay(self, plan: StepPlan) -> None:
        """Record the options of requests that start, and drop and compute embeddings of images.

        It is a collective call if the plan encodes images.
        """
        self.prompt_outputs.start_slots(plan.starts)
        if plan.dropped_images or plan.encodings:
            self.image_store.update(plan)

    @property
    def image_store(self) -> ImageStore:
        """The store of embeddings of images.

        Raises:
            ValueError: The model takes no images.
        """
        if self.images is None:
            raise ValueError(f"{self.model.config.architecture} is served without images")
        return self.images

    def drop_graphs(self) -> None:
        """Drop the graphs."""
        self.prefill_graphs = None

    def run_model(self, plan: StepPlan, layout: BatchLayout) -> tuple[torch.Tensor, DeviceSideOutputs | None]:
        """Run the model over the batch of a plan, as the replay of a graph if possible.

        Returns:
            Logits [samples, vocab], and the prompt outputs (None if no chunk has any).
        """
        graphs, reads = self.prefill_graphs, self.prompt_outputs.chunks_to_read(plan)
        read_rows = self.prompt_outputs.batch_rows(plan, reads) if reads else None
        rows, samples = needed_rows(layout, read_rows), len(layout.sample_slots)
        if (
            graphs is None
            or rows is None
            or not computes_results(graphs, samples, reads)
            or not graphs.can_run(plan, layout, len(rows))
        ):
            return self.run_eager(plan, layout, reads, read_rows)
        outputs = graphs(plan, layout, rows)
        if not reads:
            return outputs, None
        return outputs[:samples], self.prompt_outputs(reads, outputs[samples:], are_logits=not graphs.pools)

    def run_eager(
        self,
        plan: StepPlan,
        layout: BatchLayout,
        reads: list[PromptOutputRows],
        read_rows: Int64 | None = None,
    ) -> tuple[torch.Tensor, DeviceSideOutputs | None]:
        """Run the model without a graph.

        Args:
            plan: The plan.
            layout: Layout of the plan's batch.
            reads: Rows that prompt outputs need.
            read_rows: Indices of these rows in the batch, int64 [rows]; None if `reads` is empty.

        Returns:
            Logits [samples, vocab], and the prompt outputs (None if `reads` is empty).
        """
        samples = len(layout.sample_slots)
        hidden = self.forward(plan, layout, self.hidden_rows(layout, read_rows))
        side_outputs = self.prompt_outputs(reads, hidden[samples:]) if reads else None
        if not samples:
            return hidden[:0], side_outputs
        return self.model.logits(hidden[:samples] if reads else hidden), side_outputs

    def defer_grammar_update(self, plan: StepPlan, tokens: Callable[[], NDArray[Any]]) -> None:
        """Register a launched step, so that grammars advance by its tokens once they are known.

        `tokens` waits for the step and returns its tokens [samples].
        """
        masks = self.state.logits_params.masks
        if masks is None or not masks.active:
            return
        final = [chunk.slot for chunk in plan.prefill if chunk.samples]
        slots = plan.decode.astype(np.int64)
        masks.add_launched_step(
            np.concatenate([slots, np.array(final, np.int64)]) if final else slots, tokens
        )

    def hidden_rows(self, layout: BatchLayout, read_rows: Int64 | None = None) -> torch.Tensor | None:
        """Return the indices of the rows whose hidden states are needed, int64 [n] on the device.

        The rows to sample come first, then the rows for prompt outputs. None means that all rows are needed.
        """
        rows = needed_rows(layout, read_rows)
        if rows is None:
            return None
        # If no row is needed, keep one unused row, because kernels do not accept an empty batch.
        return self.upload(rows if len(rows) else np.zeros(1, np.int64))

    def forward(self, plan: StepPlan, layout: BatchLayout, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Run the model over a batch; return hidden states [n, hidden] of `rows` (None: all tokens)."""
        state, upload = self.state, self.upload
        count = len(plan.decode)
        decodes = DecodeRows(
            slots=layout.slots[:count],
            lengths=(layout.positions[:count] + 1).astype(np.int32),
            pages=state.pages,
        )
        chunks = tuple(QueryChunk(slot=c.slot, start=c.start, count=len(c.tokens)) for c in plan.prefill)
        slot_mapping = state.slot_mapping(layout.slots, layout.positions, self.attention.kv.page_size)
        slots, positions, slot_mapping = upload.upload_together(layout.slots, layout.positions, slot_mapping)
        tokens = (state.synced_last_tokens() if count else state.last_tokens)[slots[:count]]
        if chunks:
            tokens = torch.cat((tokens, upload(layout.chunk_tokens)))
        return self.model.hidden(
            tokens,
            positions,
            self.attention.plan(slot_mapping, decodes, chunks),
            rows,
            rotary=None if layout.rotary is None else upload(layout.rotary),
            images=None
            if layout.image_rows is None
            else self.image_store.gather_rows(plan, layout.image_rows),
        )
