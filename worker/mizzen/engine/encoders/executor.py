# SPDX-License-Identifier: Apache-2.0
"""Executes steps of an encoder: from whole prompts to embeddings.

Runners call it like `StepExecutor`; a step has no decodes, and each of its chunks is a whole prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mizzen.attention.whole_prompts import PromptAttention
from mizzen.core.request import Int32, Int64, Pooling
from mizzen.core.step_plan import SlotOptions, StepPlan
from mizzen.engine.encoders.graphs import EncoderGraphs
from mizzen.engine.execution.step import StepResult
from mizzen.engine.pooled_vectors import compute_vectors
from mizzen.engine.sampling.side_outputs import DeviceSideOutputs
from mizzen.engine.uploader import Uploader
from mizzen.models.encoders.description import EncoderConfig
from mizzen.models.encoders.head import ClassificationHead
from mizzen.models.encoders.model import EncoderModel


class EncoderExecutor:
    """Runs plans, in order, with an encoder.

    Operations are enqueued without waiting for the device; the runner waits for the results.
    """

    def __init__(self, model: EncoderModel, upload: Uploader) -> None:
        self.model = model
        self.upload = upload
        self.options_by_slot: dict[int, SlotOptions] = {}
        self.prefill_graphs: EncoderGraphs | None = None
        """Graphs that replace the eager forward pass of batches that fit."""

    def __call__(self, plan: StepPlan) -> StepResult:
        """Enqueue the step of a plan, and return its embeddings; it samples no tokens."""
        for start in plan.starts:
            if start.options is not None:
                self.options_by_slot[start.slot] = start.options
        tokens = torch.zeros(plan.samples, dtype=torch.int64)
        if not plan.prefill:
            return StepResult(tokens)
        lengths = np.array([len(chunk.tokens) for chunk in plan.prefill], np.int64)
        slots = tuple(chunk.slot for chunk in plan.prefill)
        options = [self.options_by_slot[slot] for slot in slots]
        prompts = np.concatenate([chunk.tokens for chunk in plan.prefill])
        hidden = self.forward(prompts, lengths, [option.second_start for option in options])
        head = self.model.head
        pooled = pool_prompts(
            hidden, lengths, [choose_pooling(option, head) for option in options], self.upload
        )
        vectors = compute_vectors(pooled, slots, options, self.finish, self.upload)
        return StepResult(tokens, DeviceSideOutputs(vectors=vectors))

    def prepare_replay(self, plan: StepPlan) -> None:
        """Do nothing: encoders do not decode."""

    def drop_graphs(self) -> None:
        """Drop the graphs."""
        self.prefill_graphs = None

    def finish(self, vectors: torch.Tensor, classify: bool) -> torch.Tensor:
        """Return the logits or embeddings [n, size] of pooled hidden states, float32 [n, hidden]."""
        head = self.model.head
        if classify and head is not None:
            return head(vectors.to(self.model.embedding.weight.dtype)).float()
        return self.model.pooled.embed(vectors)

    def forward(self, tokens: Int32, lengths: Int64, second_starts: list[int]) -> torch.Tensor:
        """Run the model over whole prompts.

        Args:
            tokens: Token ids of all prompts, one after the other, int32 [tokens].
            lengths: Number of tokens of each prompt, int64 [prompts].
            second_starts: Index of the first token of the second part of each prompt; 0 without one.

        Returns:
            The hidden states [tokens, hidden] after the last norm.
        """
        positions = prompt_positions(self.model.encoder, tokens, lengths)
        arrays = [tokens.astype(np.int64), positions]
        if self.model.encoder.token_types > 1 and any(second_starts):
            arrays.append(token_types(lengths, second_starts))
        graphs = self.prefill_graphs
        if graphs is not None and (graph := graphs.select_graph(len(tokens), len(lengths))) is not None:
            return graphs(graph, arrays, lengths)
        ids, places, *types = self.upload.upload_together(*arrays)
        attend = PromptAttention(lengths, self.model.embedding.weight.device)
        return self.model.hidden(ids, places, types[0] if types else None, attend)

    def defer_grammar_update(self, plan: StepPlan, tokens: Callable[[], NDArray[Any]]) -> None:
        """Do nothing: encoders sample no tokens."""


def prompt_positions(encoder: EncoderConfig, tokens: Int32, lengths: Int64) -> Int64:
    """Return the position of each token in its prompt, int64 [tokens].

    Padding tokens within a prompt are not counted if the encoder does not count them (RoBERTa).

    Args:
        encoder: Structure of the encoder.
        tokens: Token ids of all prompts, one after the other, int32 [tokens].
        lengths: Number of tokens of each prompt, int64 [prompts].
    """
    begins = np.cumsum(lengths) - lengths
    positions = np.arange(len(tokens), dtype=np.int64) - np.repeat(begins, lengths)
    if encoder.padding_token is not None and (padding := tokens == encoder.padding_token).any():
        counted = np.cumsum(~padding)
        before = np.repeat(counted[begins] - ~padding[begins], lengths)
        positions = np.where(padding, -1, counted - before - 1)
    return positions + encoder.first_position


def token_types(lengths: Int64, second_starts: list[int]) -> Int64:
    """Return the type of each token, int64 [tokens]: 1 in the second part of a prompt, else 0.

    Args:
        lengths: Number of tokens of each prompt, int64 [prompts].
        second_starts: Index of the first token of the second part of each prompt; 0 without one.
    """
    starts = np.where(second_starts, second_starts, lengths)
    return np.repeat(np.tile([0, 1], len(lengths)), np.stack((starts, lengths - starts), axis=1).ravel())


def choose_pooling(option: SlotOptions, head: ClassificationHead | None) -> Pooling | None:
    """Return the pooling of a prompt: that of the head for a classification, else that of the request."""
    if not option.classify or head is None:
        return option.pooling
    return Pooling.MEAN if head.mean else Pooling.CLS


def pool_prompts(
    hidden: torch.Tensor, lengths: Int64, poolings: list[Pooling | None], upload: Uploader
) -> torch.Tensor:
    """Return the pooled hidden state of each prompt, float32 [prompts, hidden size].

    Args:
        hidden: Hidden states of all prompts, one after the other, [tokens, hidden size].
        lengths: Number of tokens of each prompt, int64 [prompts].
        poolings: Pooling of each prompt.
        upload: Copies arrays to the device.
    """
    ends = np.cumsum(lengths)
    first = np.array([pooling is Pooling.CLS for pooling in poolings])
    vectors = hidden[upload(np.where(first, ends - lengths, ends - 1))].float()
    mean = np.array([pooling is Pooling.MEAN for pooling in poolings])
    if mean.any():
        if hidden.is_cuda:
            from mizzen.kernels.prompt_means import mean_prompts

            means = mean_prompts(hidden, upload(ends))
        else:
            means = torch.segment_reduce(hidden.float(), "mean", lengths=torch.from_numpy(lengths), axis=0)
        vectors = torch.where(upload(mean)[:, None], means, vectors)
    return vectors
