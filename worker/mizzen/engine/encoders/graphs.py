# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of an encoder's forward pass, by number of tokens.

Launches of one layer take as long as its kernels for hundreds of tokens, and for thousands in a small
encoder. A replay costs nearly nothing, so that the host has time to schedule the next step. A batch is padded
to the next captured number of tokens, by at most a quarter, with an additional prompt; the remaining prompts
of the graph are empty. Attention need not be computed for padding beyond the longest prompt that the encoder
supports, and nothing reads it.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mizzen.attention.whole_prompts import PromptAttention, has_prompt_kernel
from mizzen.core.request import Int32, Int64
from mizzen.engine.execution.graph_capture import capture_graph
from mizzen.models.encoders.model import EncoderModel

log = logging.getLogger(__name__)

BUFFERS = 16
"""Number of input buffers in pinned memory.

It exceeds the number of steps in flight, so the copy from a buffer is complete before its next use."""
LEAST_PROMPTS = 16
"""Minimum number of prompts of a graph."""
TOKENS_PER_PROMPT = 32
"""Number of tokens for each prompt of a large graph. More prompts would slow FlashAttention, which starts
thread blocks for each of them."""


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """Layout of the int32 buffer with a graph's inputs: ids, positions, types, and begins of prompts."""

    tokens: int
    """Number of tokens of the graph."""
    prompts: int
    """Maximum number of prompts of a batch, not counting the padding."""

    @classmethod
    def for_tokens(cls, tokens: int) -> EncoderInputs:
        """Return the layout of a graph of `tokens` tokens."""
        return cls(tokens, min(tokens, max(LEAST_PROMPTS, tokens // TOKENS_PER_PROMPT)))

    @property
    def section_sizes(self) -> tuple[int, ...]:
        """Sizes of the sections in elements: ids, positions, types, and the begins and end of all prompts."""
        return (self.tokens,) * 3 + (self.prompts + 2,)

    @property
    def size(self) -> int:
        """Length of the buffer in elements."""
        return sum(self.section_sizes)

    def pack(self, buffer: Int32, arrays: Sequence[NDArray[np.signedinteger[Any]]], lengths: Int64) -> None:
        """Write a batch and its padding into `buffer`, int32 [size].

        Args:
            buffer: The buffer.
            arrays: Ids, positions and possibly types of the tokens, [tokens] each.
            lengths: Number of tokens of each prompt, int64 [prompts].
        """
        *sections, begins = np.split(buffer, np.cumsum(self.section_sizes)[:-1])
        for section in sections:
            section[:] = 0
        for section, array in zip(sections, arrays, strict=False):
            section[: len(array)] = array
        count = len(lengths)
        begins[0] = 0
        np.cumsum(lengths, out=begins[1 : count + 1])
        begins[count + 1 :] = self.tokens


@dataclass(frozen=True, slots=True)
class EncoderGraph:
    """A captured graph, and the device buffer from which it reads its batch."""

    graph: torch.cuda.CUDAGraph
    inputs: EncoderInputs
    inbox: torch.Tensor
    """Device buffer of the inputs, int32 [inputs.size]."""


class EncoderGraphs:
    """Captured graphs of an encoder; used from one thread and in one stream."""

    def __init__(self, model: EncoderModel, sizes: list[int]) -> None:
        """Allocate the buffers that the graphs of all sizes share.

        Args:
            model: The encoder.
            sizes: Token counts to capture, ascending.

        Raises:
            ValueError: The attention of the model cannot be captured.
        """
        weight = model.embedding.weight
        if not has_prompt_kernel(weight.device, weight.dtype, model.config.head_dim):
            raise ValueError("graphs of encoders need an attention kernel for prompts of unequal lengths")
        self.model, self.device = model, weight.device
        self.inputs = [EncoderInputs.for_tokens(size) for size in sizes]
        pinned = torch.zeros((BUFFERS, self.inputs[-1].size), dtype=torch.int32).pin_memory()
        self.pinned_buffers: Iterator[torch.Tensor] = cycle(pinned.unbind())
        self.outputs = weight.new_empty((sizes[-1], model.config.hidden_size))
        """Hidden states of a replay, [tokens, hidden]."""
        self.graphs: list[EncoderGraph] = []
        """Graphs in the order of `inputs`."""

    @property
    def graph_count(self) -> int:
        """The number of graphs that `capture` captures."""
        return len(self.inputs)

    def enqueue_forward(self, inputs: EncoderInputs, inbox: torch.Tensor) -> None:
        """Enqueue one forward pass over the batch in `inbox` (int32 [inputs.size]); it writes `outputs`."""
        ids, positions, types, begins = inbox.split(inputs.section_sizes)
        hidden = self.model.hidden(
            ids.long(),
            positions.long(),
            types.long() if self.model.encoder.token_types > 1 else None,
            PromptAttention.from_device(begins, min(inputs.tokens, self.model.config.context_length)),
        )
        self.outputs[: inputs.tokens].copy_(hidden)

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
        with torch.inference_mode(), torch.cuda.stream(stream):
            for inputs in reversed(self.inputs):
                blank = np.zeros(inputs.size, np.int32)
                inputs.pack(blank, [], np.empty(0, np.int64))
                inbox = torch.from_numpy(blank).to(self.device)
                graph = capture_graph(partial(self.enqueue_forward, inputs, inbox), stream, pool)
                self.graphs.append(EncoderGraph(graph, inputs, inbox))
                pool = pool or graph.pool()
                captured()
        self.graphs.reverse()
        stream.synchronize()
        seconds = time.perf_counter() - start_time
        log.info(
            "captured %d graphs for up to %d tokens in %.1f s", self.graph_count, len(self.outputs), seconds
        )

    def select_graph(self, tokens: int, prompts: int) -> EncoderGraph | None:
        """Return the smallest graph for a batch, or None if it is too large for all graphs."""
        first = bisect_left(self.graphs, tokens, key=lambda graph: graph.inputs.tokens)
        return next((graph for graph in self.graphs[first:] if graph.inputs.prompts >= prompts), None)

    def __call__(
        self, graph: EncoderGraph, arrays: Sequence[NDArray[np.signedinteger[Any]]], lengths: Int64
    ) -> torch.Tensor:
        """Replay the forward pass over a batch of whole prompts.

        Args:
            graph: The result of `select_graph`.
            arrays: Ids, positions and possibly types of the tokens, [tokens] each.
            lengths: Number of tokens of each prompt, int64 [prompts].

        Returns:
            The hidden states [tokens, hidden] after the last norm, valid until the next replay in stream
            order.
        """
        buffer = next(self.pinned_buffers)[: graph.inputs.size]
        graph.inputs.pack(buffer.numpy(), arrays, lengths)
        graph.inbox.copy_(buffer, non_blocking=True)
        graph.graph.replay()
        return self.outputs[: len(arrays[0])]
