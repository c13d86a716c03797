# SPDX-License-Identifier: Apache-2.0
"""Executes steps of an encoder: from whole prompts to embeddings.

Runners call it like `StepExecutor`; a step has no decodes, and each of its chunks is a whole prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mizzen.attention.whole_prompts import PromptAttention
from mizzen.core.request import Int32, Int64, Pooling
from mizzen.core.step_plan import SlotOptions, StepPlan
from mizzen.engine.execution.prefill_graphs import PrefillGraphs
from mizzen.engine.execution.step import StepResult
from mizzen.engine.sampling.side_outputs import DeviceSideOutputs, PooledVectors
from mizzen.engine.uploader import Uploader
from mizzen.models.encoders.description import EncoderConfig
from mizzen.models.encoders.model import EncoderModel
from mizzen.models.pooling.output import DenseLayer


class EncoderExecutor:
    """Runs plans, in order, with an encoder.

    Operations are enqueued without waiting for the device; the runner waits for the results.
    """

    def __init__(self, model: EncoderModel, upload: Uploader, dense: Sequence[DenseLayer] = ()) -> None:
        """Create the executor of a model, with the Dense modules that follow the pooling."""
        self.model = model
        self.dense = dense
        self.upload = upload
        self.options_by_slot: dict[int, SlotOptions] = {}
        self.prefill_graphs: PrefillGraphs | None = None

    def __call__(self, plan: StepPlan) -> StepResult:
        """Enqueue the step of a plan, and return its embeddings; it samples no tokens."""
        for start in plan.starts:
            if start.options is not None:
                self.options_by_slot[start.slot] = start.options
        tokens = torch.zeros(plan.samples, dtype=torch.int64)
        if not plan.prefill:
            return StepResult(tokens)
        lengths = np.array([len(chunk.tokens) for chunk in plan.prefill], np.int64)
        hidden = self.forward(np.concatenate([chunk.tokens for chunk in plan.prefill]), lengths)
        slots = tuple(chunk.slot for chunk in plan.prefill)
        options = [self.options_by_slot[slot] for slot in slots]
        vectors = pool_prompts(hidden, lengths, options, self.upload)
        for layer in self.dense:
            vectors = layer(vectors)
        vectors = normalize_vectors(vectors, options, self.upload)
        return StepResult(tokens, DeviceSideOutputs(vectors=(PooledVectors(slots, vectors),)))

    def forward(self, tokens: Int32, lengths: Int64) -> torch.Tensor:
        """Run the model over whole prompts.

        Args:
            tokens: Token ids of all prompts, one after the other, int32 [tokens].
            lengths: Number of tokens of each prompt, int64 [prompts].

        Returns:
            The hidden states [tokens, hidden] after the last norm.
        """
        positions = prompt_positions(self.model.encoder, tokens, lengths)
        ids, places = self.upload.upload_together(tokens.astype(np.int64), positions)
        attend = PromptAttention(lengths, self.model.embedding.weight.device)
        return self.model.hidden(ids, places, None, attend)

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


def pool_prompts(
    hidden: torch.Tensor, lengths: Int64, options: list[SlotOptions], upload: Uploader
) -> torch.Tensor:
    """Return the pooled hidden state of each prompt, float32 [prompts, hidden size].

    Args:
        hidden: Hidden states of all prompts, one after the other, [tokens, hidden size].
        lengths: Number of tokens of each prompt, int64 [prompts].
        options: Pooling of each prompt.
        upload: Copies arrays to the device.
    """
    ends = np.cumsum(lengths)
    first = np.array([option.pooling is Pooling.CLS for option in options])
    vectors = hidden[upload(np.where(first, ends - lengths, ends - 1))].float()
    mean = np.array([option.pooling is Pooling.MEAN for option in options])
    if mean.any():
        means = torch.segment_reduce(hidden.float(), "mean", lengths=upload(lengths), axis=0)
        vectors = torch.where(upload(mean)[:, None], means, vectors)
    return vectors


def normalize_vectors(vectors: torch.Tensor, options: list[SlotOptions], upload: Uploader) -> torch.Tensor:
    """Return vectors, float32 [prompts, size], after scaling to length 1 where `options` say so."""
    normalised = np.array([option.normalize for option in options])
    if not normalised.any():
        return vectors
    return torch.where(upload(normalised)[:, None], F.normalize(vectors, dim=-1), vectors)
