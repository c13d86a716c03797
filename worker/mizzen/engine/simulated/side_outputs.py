# SPDX-License-Identifier: Apache-2.0
"""Side outputs of a simulated model: log probabilities and embeddings that follow fixed rules.

The sampled (or prompt) token t is the most probable one. Token t + i has half the probability of t + i - 1. A
hidden state is a function of all tokens up to its position.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field

import numpy as np

from mizzen.core.request import Int32, Pooling
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.step_plan import Float32, PrefillChunk, SideOutputs, SlotLogprobs, SlotOptions, SlotVector

HIDDEN_SIZE = 16
"""Size of hidden states and embeddings."""


def logprob_entries(
    tokens: Int32, top: int, by_id: tuple[int, ...], vocab_size: int
) -> tuple[Int32, Float32]:
    """Return token ids (int32) and log probabilities (float32), both [n, 1 + top + len(by_id)].

    Args:
        tokens: Sampled or prompt tokens, int32 [n].
        top: Number of most probable tokens.
        by_id: Ids of further tokens.
        vocab_size: Size of the vocabulary.
    """
    ranks = np.concatenate([[0], np.arange(top)])
    ids = (tokens[:, None].astype(np.int64) + ranks) % vocab_size
    requested = np.broadcast_to(np.array(by_id, np.int64), (len(tokens), len(by_id)))
    distances = np.concatenate(
        [np.broadcast_to(ranks, ids.shape), (requested - tokens[:, None]) % vocab_size], 1
    )
    values = np.maximum(-math.log(2) * (distances + 1), -9999.0)
    return np.concatenate([ids, requested], 1).astype(np.int32), values.astype(np.float32)


def hidden_states(tokens: Int32, first: int, size: int = HIDDEN_SIZE) -> Float32:
    """Return the hidden states of the tokens from index `first` on, float32 [n, size]."""
    digest = zlib.crc32(tokens[:first].tobytes())
    digests = []
    for token in tokens[first:]:
        digest = zlib.crc32(token.tobytes(), digest)
        digests.append(digest)
    angles = np.array(digests, np.float64)[:, None] * np.arange(1, size + 1)
    return np.sin(angles).astype(np.float32)


@dataclass(slots=True)
class SimulatedSideOutputs:
    """Computes the side outputs of a simulated device; holds the options and pooling state of its slots."""

    vocab_size: int
    labels: int = 0
    """Number of labels of a simulated classifier."""
    options_by_slot: dict[int, tuple[SamplingParams, SlotOptions]] = field(default_factory=dict)
    hidden_sums: dict[int, Float32] = field(default_factory=dict)

    def start_slot(self, slot: int, sampling: SamplingParams, options: SlotOptions | None) -> None:
        """Record the options of a request that starts in a slot."""
        self.hidden_sums.pop(slot, None)
        self.options_by_slot.pop(slot, None)
        if options is not None:
            self.options_by_slot[slot] = (sampling, options)

    def avoid_early_end(self, slot: int, token: int, output_tokens: int) -> int:
        """Return `token`, or the next id that is not an end token if `token` would end the output too early.

        That is the case if the output has fewer than min_tokens tokens.
        """
        if slot in self.options_by_slot:
            sampling, options = self.options_by_slot[slot]
            ends = options.end_tokens if output_tokens < sampling.min_tokens else ()
            while token in ends and len(ends) < self.vocab_size:
                token = (token + 1) % self.vocab_size
        return token

    def output_logprobs(self, slot: int, token: int) -> SlotLogprobs | None:
        """Return the log probabilities of a sampled token, or None if the slot does not request them."""
        if slot not in self.options_by_slot:
            return None
        sampling, options = self.options_by_slot[slot]
        if sampling.logprobs is None or options.pooling is not None:
            return None
        tokens = np.array([token], np.int32)
        return SlotLogprobs(
            slot, *logprob_entries(tokens, sampling.logprobs, sampling.logprob_token_ids, self.vocab_size)
        )

    def prompt_logprobs(self, chunk: PrefillChunk) -> SlotLogprobs | None:
        """Return log probabilities of the prompt tokens that follow the tokens of a chunk.

        Returns None if the request has no `prompt_logprobs`, or if no prompt token follows.
        """
        options = self.options_by_slot[chunk.slot][1]
        if options.prompt_logprobs is None:
            return None
        start = max(chunk.start + 1, options.prompt_logprobs_from)
        tokens = options.tokens[start : min(chunk.start + 1 + len(chunk.tokens), options.prompt_tokens)]
        if not len(tokens):
            return None
        return SlotLogprobs(
            chunk.slot, *logprob_entries(tokens, options.prompt_logprobs, (), self.vocab_size), start
        )

    def pool_hidden(self, chunk: PrefillChunk, tokens: Int32) -> SlotVector | None:
        """Return the embedding or the logits of a prompt, or None if its last chunk is still to come.

        `tokens` are all tokens of the slot up to the end of the chunk, int32 [n].
        """
        slot, options = chunk.slot, self.options_by_slot[chunk.slot][1]
        if options.pooling is None or (options.pooling is not Pooling.MEAN and not chunk.last):
            return None
        if options.classify:
            return SlotVector(slot, hidden_states(tokens, len(tokens) - 1, self.labels)[0])
        if options.pooling is not Pooling.MEAN:
            position = len(tokens) - 1 if options.pooling is Pooling.LAST else 0
            vector = hidden_states(tokens, position)[0]
        else:
            vector = self.hidden_sums.pop(slot, np.zeros(HIDDEN_SIZE, np.float32))
            vector = vector + hidden_states(tokens, chunk.start).sum(axis=0)
            if not chunk.last:
                self.hidden_sums[slot] = vector
                return None
            vector = vector / np.float32(len(tokens))
        return SlotVector(slot, vector / np.linalg.norm(vector) if options.normalize else vector)

    def step_outputs(self, chunks: list[tuple[PrefillChunk, Int32]], sampled: dict[int, int]) -> SideOutputs:
        """Return the side outputs of a step.

        Args:
            chunks: Chunks of the step, each with all tokens of its slot up to the end of the chunk.
            sampled: Sampled tokens by slot.
        """
        requested = [(chunk, tokens) for chunk, tokens in chunks if chunk.slot in self.options_by_slot]
        logprobs = [self.prompt_logprobs(chunk) for chunk, _ in requested]
        logprobs += [self.output_logprobs(slot, token) for slot, token in sampled.items()]
        vectors = [self.pool_hidden(chunk, tokens) for chunk, tokens in requested]
        return SideOutputs(
            tuple(part for part in logprobs if part is not None),
            tuple(vector for vector in vectors if vector is not None),
        )
