# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of steps with prefill, in which decodes and chunks form one batch of sequences.

If kernels are launched one by one, each layer costs the host a fixed time, regardless of the number of
tokens. A graph helps if these launches take longer than the GPU's work. This is the case for short chunks of
large models and for most chunks of small models.

A batch is padded to the next captured number of tokens with an additional sequence in the scratch slot:

    tokens      | decodes, one each | chunk | chunk | padding      |
    sequences   | 1 | 1 | 1 |   ... |       |       |              | empty ones |

For small numbers of tokens there is a second graph, for steps with few chunks, in which the attention to long
contexts is split among thread blocks.

Rotary positions and the rows of images in their table are inputs, so that the graphs of models that take
images run prompts with and without them.

`StepExecutor` replays a graph instead of its eager forward pass.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch

from mizzen.attention.base import DevicePlannedSequences, MixedAttention, StepAttention
from mizzen.attention.mixed_batches import (
    FEW_CHUNKS,
    DeviceBatch,
    MixedPlanner,
    MixedPlanners,
    choose_planners,
)
from mizzen.core.request import Int64
from mizzen.core.step_plan import StepPlan
from mizzen.engine.execution.forward_batch import BatchLayout
from mizzen.engine.execution.graph_capture import capture_graph
from mizzen.engine.execution.image_store import ImageStore
from mizzen.engine.execution.packed_batch import ROTARY_AXES, PackedLayout
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.graph_sizes import MAX_GRAPH_TOKENS
from mizzen.engine.uploader import Uploader
from mizzen.models.config import ModelConfig
from mizzen.models.image_rows import TableImages
from mizzen.models.served_model import ServedModel

log = logging.getLogger(__name__)

BUFFERS = 16
"""Number of packed buffers in pinned memory.

It exceeds the number of steps in flight, so the copy from a buffer is complete before its next use."""
LAYER_LAUNCH_SECONDS = 0.4e-3
"""Host time in seconds to launch the kernels of one layer; measured on the machine of docs/benchmarks.md."""
PREFILL_FLOPS = 600e12
"""Floating-point operations per second of prefill; measured on the machine of docs/benchmarks.md."""
HALF_BUSY_QUERY_HEADS = 66 * 128
"""Number of pairs of a query and a head that keep half of a Hopper GPU's 132 SMs busy, if each
processes a tile of 128 pairs."""
LONG_CONTEXT = 2048
"""Number of tokens from which splitting a context saves more time than combining the parts costs."""
MAX_SPLIT_TOKENS = 384
"""Largest graph, in tokens, that splits contexts; for larger steps the gain is small."""
SPLIT_SIZE_STEP = 32
"""Sizes of graphs that split contexts are multiples of this number of tokens; padding small steps to them
costs nearly nothing, because reading the weights takes most of their time."""


def token_sizes(largest: int) -> list[int]:
    """Return the token counts to capture, from 16 to `largest`.

    The count after n is larger by a quarter of the largest power of two that is at most n (by an eighth of it
    if n is 256 or more), but by at least 16. The last count is `largest`.
    """
    sizes, size = [], 16
    while size < largest:
        sizes.append(size)
        floor = 1 << (size.bit_length() - 1)
        size += max(16, floor // (8 if size >= 256 else 4))
    return [*sizes, largest]


def max_profitable_tokens(config: ModelConfig, most: int) -> int:
    """Return the largest token count, at most `most`, for which a graph is faster than eager launches.

    The estimate is twice the number of tokens for which the GPU's work takes as long as the host's launches.
    It is doubled because a graph with more tokens still helps after a short step: without the graph, the GPU
    would wait for the first launches. It is rounded up to a multiple of 128 tokens, and limited to
    `MAX_GRAPH_TOKENS`.
    """
    tokens = int(2 * LAYER_LAUNCH_SECONDS * PREFILL_FLOPS / (2 * config.layer_weights))
    return min(-(-tokens // 128) * 128, MAX_GRAPH_TOKENS, most)


def select_size(sizes: list[int], tokens: int) -> int:
    """Return the smallest of the ascending `sizes` that is at least `tokens`."""
    return sizes[bisect_left(sizes, tokens)]


@dataclass(frozen=True, slots=True)
class SplitSizes:
    """Sizes of the graphs that split the contexts of few chunks, and the steps that use these graphs."""

    sizes: list[int]
    """Token counts of the graphs, ascending."""
    max_prompt_tokens: int
    """Number of prompt tokens from which splitting contexts is not faster."""

    @classmethod
    def choose(cls, sizes: list[int], heads: int, context_length: int) -> SplitSizes:
        """Choose from the token counts of all graphs.

        Args:
            sizes: Token counts of the graphs without splits, ascending.
            heads: Number of query heads on this GPU.
            context_length: Maximum number of tokens of a context; without long contexts there are no graphs.
        """
        chosen = [size for size in sizes if size <= MAX_SPLIT_TOKENS and size % SPLIT_SIZE_STEP == 0]
        return cls(chosen if context_length > LONG_CONTEXT else [], HALF_BUSY_QUERY_HEADS // heads)

    def select(self, plan: StepPlan, tokens: int) -> int | None:
        """Return the size of the graph for a plan with `tokens` tokens; None for a graph without splits."""
        if (
            not self.sizes
            or tokens > self.sizes[-1]
            or tokens - len(plan.decode) >= self.max_prompt_tokens
            or len(plan.prefill) > FEW_CHUNKS
            or max(chunk.start + len(chunk.tokens) for chunk in plan.prefill) <= LONG_CONTEXT
        ):
            return None
        return select_size(self.sizes, tokens)


@dataclass(frozen=True, slots=True)
class PrefillGraph:
    """A captured graph, and the device buffer from which it reads its batch."""

    graph: torch.cuda.CUDAGraph
    layout: PackedLayout
    inbox: torch.Tensor
    """Device buffer of the packed batch, int32 [layout.size]."""


class PrefillGraphs:
    """Captured graphs of forward passes, by number of tokens; used from one thread and in one stream.

    A graph ends with the logits of the rows to sample and of the prompt rows whose log probabilities are
    needed, in a buffer that the next replay overwrites. Sampling is not part of the graph. The graphs of a
    model that does not generate end with the hidden states of the rows to pool, so that they compute no
    logits.
    """

    def __init__(
        self,
        model: ServedModel,
        attention: MixedAttention,
        state: SlotState,
        upload: Uploader,
        sizes: list[int],
        rows: int,
        planners: MixedPlanners | None = None,
        images: ImageStore | None = None,
    ) -> None:
        """Allocate the buffers that the graphs of all sizes share.

        Args:
            model: The model.
            attention: Attention backends over the KV cache.
            state: Per-slot device state.
            upload: Copies arrays to the device.
            sizes: Token counts to capture, ascending.
            rows: Maximum number of sequences.
            planners: Plan attention; None for the fastest planners that the backends support.
            images: Embeddings of images; None for a model that takes no images.

        Raises:
            ValueError: The prefill backend needs lengths on the host, or `state` has no scratch slot.
        """
        if not isinstance(attention.prefill, DevicePlannedSequences) or state.scratch_slot is None:
            raise ValueError("prefill graphs need a backend with lengths on the device, and a scratch slot")
        self.planners = planners or choose_planners(attention.prefill, attention.decode, rows)
        self.split_sizes = SplitSizes([], 0)
        if self.planners.few_chunks is not None:
            context_length = state.page_table.device.shape[1] * attention.kv.page_size
            self.split_sizes = SplitSizes.choose(sizes, attention.prefill.geometry.heads, context_length)
        self.model = model
        self.kv = attention.kv
        self.state = state
        self.scratch_slot = state.scratch_slot
        self.device = upload.device
        self.sizes = sizes
        self.max_sequences = rows
        self.has_rotary = state.rotary_offsets is not None
        self.images = images
        largest = self.packed_layout(sizes[-1]).size
        pinned = torch.zeros((BUFFERS, largest), dtype=torch.int32).pin_memory()
        self.pinned_buffers: Iterator[torch.Tensor] = cycle(pinned.unbind())
        count, dtype = min(sizes[-1], rows), model.embedding.weight.dtype
        self.pools = not model.config.generates
        """Whether the graphs end with hidden states."""
        self.outputs = (
            torch.empty((count, model.config.hidden_size), dtype=dtype, device=self.device)
            if self.pools
            else state.ranks.allocate_logits_buffer(count, model.config.vocab_size, dtype, self.device)
        )
        """Results of a replay: logits [sequences, vocab] or hidden states [sequences, hidden]."""
        self.graphs: dict[int, PrefillGraph] = {}
        """Graphs of steps with any chunks, by number of tokens."""
        self.split_graphs: dict[int, PrefillGraph] = {}
        """Graphs of steps with few chunks and long contexts, by number of tokens."""

    def packed_layout(self, size: int) -> PackedLayout:
        """Return the layout of the buffer of the graphs of `size` tokens."""
        sequences = min(size, self.max_sequences)
        return PackedLayout(size, sequences, self.has_rotary, self.images is not None)

    @property
    def graph_count(self) -> int:
        """The number of graphs that `capture` captures."""
        return len(self.sizes) + len(self.split_sizes.sizes)

    def enqueue_forward(self, packed: PackedLayout, inbox: torch.Tensor, planner: MixedPlanner) -> None:
        """Enqueue one forward pass over the batch in `inbox` (int32 [packed.size]); it writes `outputs`."""
        from mizzen.kernels.decode_inputs import gather_inputs

        state, table = self.state, self.state.page_table.device
        parts = packed.split_tensor(inbox)
        batch = gather_inputs(
            parts.slots,
            parts.positions,
            state.synced_last_tokens(),
            table,
            self.kv.page_size,
            self.scratch_slot,
        )
        tokens = torch.where(parts.host_tokens >= 0, parts.host_tokens, batch.tokens)
        attention_plan = planner(
            DeviceBatch(
                is_decode=parts.host_tokens < 0,
                slots=parts.slots,
                positions=parts.positions,
                starts=parts.starts,
                sequence_slots=parts.sequence_slots,
                lengths=parts.lengths,
                table=table,
                scratch_slot=self.scratch_slot,
            )
        )
        attend = StepAttention(self.kv, batch.slot_mapping, 0, None, attention_plan, batch.live)
        hidden = self.model.hidden(
            tokens,
            batch.positions,
            attend,
            parts.rows.long(),
            rotary=parts.rotary.view(ROTARY_AXES, packed.tokens) if packed.has_rotary else None,
            images=None if self.images is None else TableImages.from_indices(self.images.table, parts.images),
        )
        if self.pools:
            self.outputs[: packed.sequences].copy_(hidden)
        else:
            self.model.logits(hidden, self.outputs[: packed.sequences])

    def capture(
        self,
        stream: torch.cuda.Stream,
        captured: Callable[[], None] = lambda: None,
        pool: tuple[int, int] | None = None,
    ) -> None:
        """Capture all graphs, and call `captured` after each.

        The largest size is captured first, so that all others share its memory, which comes from `pool`.
        """
        start_time = time.perf_counter()
        families = [(self.graphs, self.sizes, self.planners.any_chunks)]
        if self.planners.few_chunks is not None:
            families.append((self.split_graphs, self.split_sizes.sizes, self.planners.few_chunks))
        with torch.inference_mode(), torch.cuda.stream(stream):
            for graphs, sizes, planner in families:
                for size in reversed(sizes):
                    graphs[size] = self.capture_size(size, planner, stream, pool)
                    pool = pool or graphs[size].graph.pool()
                    captured()
        stream.synchronize()
        seconds = time.perf_counter() - start_time
        log.info(
            "captured %d prefill graphs for up to %d tokens in %.1f s",
            self.graph_count,
            self.sizes[-1],
            seconds,
        )

    def capture_size(
        self, size: int, planner: MixedPlanner, stream: torch.cuda.Stream, pool: tuple[int, int] | None
    ) -> PrefillGraph:
        """Capture the graph of `size` tokens whose attention is planned by `planner`."""
        packed = self.packed_layout(size)
        inbox = torch.from_numpy(packed.make_padding(self.scratch_slot)).to(self.device)
        graph = capture_graph(partial(self.enqueue_forward, packed, inbox, planner), stream, pool)
        return PrefillGraph(graph, packed, inbox)

    def can_run(self, plan: StepPlan, layout: BatchLayout, rows: int) -> bool:
        """Return whether a plan has prefill, and its tokens and rows fit the largest graph.

        Args:
            plan: The plan.
            layout: Layout of its batch.
            rows: Number of rows whose results are needed.
        """
        return bool(plan.prefill) and len(layout.slots) <= self.sizes[-1] and rows <= self.max_sequences

    def __call__(self, plan: StepPlan, layout: BatchLayout, rows: Int64) -> torch.Tensor:
        """Replay the forward pass of a plan; its page writes and starts must already have been applied.

        Args:
            plan: A plan for which `can_run` returned True.
            layout: Layout of its batch.
            rows: Indices of the rows whose results are needed, int64 [rows].

        Returns:
            Logits [rows, vocab] or hidden states [rows, hidden], valid until the next replay in stream order.
        """
        captured = self.select_graph(plan, len(layout.slots))
        buffer = next(self.pinned_buffers)[: captured.layout.size]
        table_rows = None
        if self.images is not None and layout.image_rows is not None:
            table_rows = self.images.find_rows(plan)
        captured.layout.pack(buffer.numpy(), plan, layout, rows, table_rows, self.scratch_slot)
        captured.inbox.copy_(buffer, non_blocking=True)
        captured.graph.replay()
        return self.outputs[: len(rows)]

    def select_graph(self, plan: StepPlan, tokens: int) -> PrefillGraph:
        """Return the fastest captured graph for a plan with this number of tokens."""
        if (size := self.split_sizes.select(plan, tokens)) is not None:
            return self.split_graphs[size]
        return self.graphs[select_size(self.sizes, tokens)]
