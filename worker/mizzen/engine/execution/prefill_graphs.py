"""Steps with prompts as captured CUDA graphs: decodes and chunks are one batch of sequences.

To launch a step's kernels one by one costs the host a time for each layer, however few tokens run. Where that
is longer than the GPU takes, a graph pays: for short chunks of large models, and most chunks of small ones.

A batch is padded to the next captured number of tokens, with one more sequence that belongs to the slot of
padding:

    tokens      | decodes, one each | chunk | chunk | padding      |
    sequences   | 1 | 1 | 1 |   ... |       |       |              | empty ones |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import torch

from mizzen.attention.base import Attend, DeviceSequences, MixedAttention
from mizzen.core.request import Int32
from mizzen.core.step_plan import StepPlan
from mizzen.engine.execution.graph_capture import captured_graph
from mizzen.engine.execution.slot_state import SlotState, Uploader
from mizzen.models.config import ModelConfig
from mizzen.models.decoder import Decoder

if TYPE_CHECKING:
    from mizzen.engine.execution.forward_batch import Layout

log = logging.getLogger(__name__)

BUFFERS = 16
"""Packed buffers in pinned memory; more than steps in flight, so that none is written before it was sent."""
LAYER_LAUNCH_SECONDS = 0.4e-3
"""What a host takes to launch the kernels of a layer, measured on the machine of docs/benchmarks.md."""
PREFILL_FLOPS = 600e12
"""Operations a second that prompts reach there."""
MOST_TOKENS = 4096
"""Graphs of more tokens are not captured by themselves: they take memory from KV."""


def token_sizes(largest: int) -> list[int]:
    """Return the numbers of tokens to capture, up to `largest`: an eighth apart where padding costs most."""
    sizes, size = [], 16
    while size < largest:
        sizes.append(size)
        floor = 1 << (size.bit_length() - 1)
        size += max(16, floor // (8 if size >= 256 else 4))
    return [*sizes, largest]


def paying_tokens(config: ModelConfig, most: int) -> int:
    """Return up to how many tokens, of `most`, graphs pay.

    Up to twice as many as take the GPU the time that the launches take the host: behind a short step they
    are on its way still.
    """
    attention = config.hidden_size * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    tokens = int(2 * LAYER_LAUNCH_SECONDS * PREFILL_FLOPS / (2 * layer))
    return min(-(-tokens // 128) * 128, MOST_TOKENS, most)


@dataclass(frozen=True, slots=True)
class Packed:
    """Where things stand in the int32 numbers that tell a replay its batch."""

    tokens: int
    rows: int
    """Sequences of requests at most; there is one more, of padding."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes: ids, slots and positions by token; starts, slots and lengths by sequence; rows to sample."""
        sequences = self.rows + 1
        return (self.tokens,) * 3 + (sequences + 1, sequences, sequences, self.rows)

    @property
    def size(self) -> int:
        """Numbers in all."""
        return sum(self.parts)


@dataclass(frozen=True, slots=True)
class Captured:
    """One graph and what it reads."""

    graph: torch.cuda.CUDAGraph
    packed: Packed
    inbox: torch.Tensor


class PrefillGraphs:
    """Captured forward passes, by number of tokens. Used from one thread, in one stream.

    They end with the logits of the rows that are sampled, in a buffer that the next replay overwrites in
    stream order; sampling follows as in any other step.
    """

    def __init__(
        self,
        model: Decoder,
        attention: MixedAttention,
        state: SlotState,
        upload: Uploader,
        sizes: list[int],
        rows: int,
    ) -> None:
        """Allocate what all sizes share; `rows` is the largest number of sequences.

        Raises:
            ValueError: the attention backend needs lengths on the host, or the state has no slot for padding.
        """
        if not isinstance(attention.prefill, DeviceSequences) or state.scratch is None:
            raise ValueError(
                "prefill graphs need a backend with lengths on the device, and a slot of padding"
            )
        self.backend: DeviceSequences = attention.prefill
        self.model = model
        self.kv = attention.kv
        self.state = state
        self.scratch = state.scratch
        self.device = upload.device
        self.sizes = sizes
        self.rows = rows
        largest = Packed(sizes[-1], min(sizes[-1], rows)).size
        pinned = torch.zeros((BUFFERS, largest), dtype=torch.int32).pin_memory()
        self.buffers: Iterator[torch.Tensor] = cycle(pinned.unbind())
        self.logits = state.ranks.room(
            min(sizes[-1], rows), model.config.vocab_size, model.embedding.weight.dtype, self.device
        )
        self.graphs: dict[int, Captured] = {}

    def forward(self, packed: Packed, inbox: torch.Tensor) -> None:
        """Enqueue what a replay does: from the inbox to `logits`."""
        from mizzen.kernels.decode_inputs import gather_inputs

        state = self.state
        known, slots, positions, starts, which, lengths, rows = inbox.split(packed.parts)
        batch = gather_inputs(slots, positions, state.agreed_tokens(), state.table.device, self.kv.page_size)
        tokens = torch.where(known >= 0, known, batch.tokens)
        run = self.backend.plan_on_device(starts, which, lengths, state.table.device, packed.tokens)
        attend = Attend(self.kv, batch.cells, 0, None, run)
        hidden = self.model.hidden(tokens, batch.positions, attend, rows.long())
        self.model.logits(hidden, self.logits[: packed.rows])

    def capture(
        self,
        stream: torch.cuda.Stream,
        captured: Callable[[], None] = lambda: None,
        pool: tuple[int, int] | None = None,
    ) -> None:
        """Capture every size, the largest first, so that all share its memory; `captured` is told each."""
        begin = time.perf_counter()
        with torch.inference_mode(), torch.cuda.stream(stream):
            for size in reversed(self.sizes):
                packed = Packed(size, min(size, self.rows))
                inbox = torch.from_numpy(self.blank(packed)).to(self.device)
                graph = captured_graph(partial(self.forward, packed, inbox), stream, pool)
                pool = pool or graph.pool()
                self.graphs[size] = Captured(graph, packed, inbox)
                captured()
        stream.synchronize()
        seconds = time.perf_counter() - begin
        log.info(
            "captured %d prefill graphs of up to %d tokens in %.1f s",
            len(self.sizes),
            self.sizes[-1],
            seconds,
        )

    def blank(self, packed: Packed) -> Int32:
        """Return the numbers of a batch of padding alone."""
        numbers = np.zeros(packed.size, np.int32)
        _, slots, _, starts, which, lengths, _ = np.split(numbers, np.cumsum(packed.parts)[:-1])
        slots[:] = which[:] = self.scratch
        starts[1:] = packed.tokens
        lengths[:] = 1
        return numbers

    def takes(self, plan: StepPlan, layout: Layout) -> bool:
        """Tell whether a laid out plan is of a size that is captured."""
        count = len(layout.slots)
        return bool(plan.prefill) and count <= self.sizes[-1] and len(layout.sample_slots) <= self.rows

    def __call__(self, plan: StepPlan, layout: Layout) -> torch.Tensor:
        """Run a plan whose pages and starts are written.

        Returns:
            Logits [samples, vocab], valid until the next replay in stream order.
        """
        captured = self.graphs[self.sizes[int(np.searchsorted(self.sizes, len(layout.slots)))]]
        buffer = next(self.buffers)[: captured.packed.size]
        self.pack(captured.packed, buffer.numpy(), plan, layout)
        captured.inbox.copy_(buffer, non_blocking=True)
        captured.graph.replay()
        return self.logits[: len(layout.sample_slots)]

    def pack(self, packed: Packed, numbers: Int32, plan: StepPlan, layout: Layout) -> None:
        """Write a batch and its padding."""
        known, slots, positions, starts, which, lengths, rows = np.split(
            numbers, np.cumsum(packed.parts)[:-1]
        )
        count, decodes, chunks = len(layout.slots), len(plan.decode), plan.prefill
        sequences = decodes + len(chunks)
        known[:decodes] = -1
        known[decodes:count] = layout.chunk_tokens
        known[count:] = 0
        slots[:count], slots[count:] = layout.slots, self.scratch
        positions[:count], positions[count:] = layout.positions, 0
        starts[: decodes + 1] = np.arange(decodes + 1)
        starts[decodes + 1 : sequences + 1] = decodes + np.cumsum([len(chunk.tokens) for chunk in chunks])
        starts[sequences + 1 :] = packed.tokens
        which[:decodes], which[sequences:] = plan.decode, self.scratch
        which[decodes:sequences] = [chunk.slot for chunk in chunks]
        lengths[:decodes], lengths[sequences:] = layout.positions[:decodes] + 1, 1
        lengths[decodes:sequences] = [chunk.start + len(chunk.tokens) for chunk in chunks]
        samples = layout.sample_rows
        rows[:] = 0
        if samples is not None:
            rows[: len(samples)] = samples
