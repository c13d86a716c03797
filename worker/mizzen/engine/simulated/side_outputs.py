"""What a simulated model says beside its tokens: made-up log probabilities and embeddings, by rule.

The i-th most probable token behind another one is the one with an id higher by i, and half as probable as
the one before. A hidden state is a function of all tokens up to its own.
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


def rows(tokens: Int32, top: int, by_id: tuple[int, ...], vocab_size: int) -> tuple[Int32, Float32]:
    """Return the entries of tokens: ids and log probabilities, each [tokens, 1 + top + by_id]."""
    steps = np.concatenate([[0], np.arange(top)])
    ids = (tokens[:, None].astype(np.int64) + steps) % vocab_size
    named = np.broadcast_to(np.array(by_id, np.int64), (len(tokens), len(by_id)))
    behind = np.concatenate([np.broadcast_to(steps, ids.shape), (named - tokens[:, None]) % vocab_size], 1)
    values = np.maximum(-math.log(2) * (behind + 1), -9999.0)
    return np.concatenate([ids, named], 1).astype(np.int32), values.astype(np.float32)


def hidden_states(tokens: Int32, first: int) -> Float32:
    """Return the hidden states [n, HIDDEN_SIZE] of the tokens from `first` on, each of all up to it."""
    digest = zlib.crc32(tokens[:first].tobytes())
    digests = []
    for token in tokens[first:]:
        digest = zlib.crc32(token.tobytes(), digest)
        digests.append(digest)
    angles = np.array(digests, np.float64)[:, None] * np.arange(1, HIDDEN_SIZE + 1)
    return np.sin(angles).astype(np.float32)


@dataclass(slots=True)
class SideTable:
    """What the slots of a simulated device ask."""

    vocab_size: int
    asks: dict[int, tuple[SamplingParams, SlotOptions]] = field(default_factory=dict)
    sums: dict[int, Float32] = field(default_factory=dict)

    def start(self, slot: int, sampling: SamplingParams, asks: SlotOptions | None) -> None:
        """Take note of what a request asks that takes a slot."""
        self.sums.pop(slot, None)
        self.asks.pop(slot, None)
        if asks is not None:
            self.asks[slot] = (sampling, asks)

    def allowed(self, slot: int, token: int, output: int) -> int:
        """Return the token that a slot may draw in place of one that ends it too early."""
        if slot in self.asks:
            sampling, asks = self.asks[slot]
            ends = asks.end_tokens if output < sampling.min_tokens else ()
            while token in ends and len(ends) < self.vocab_size:
                token = (token + 1) % self.vocab_size
        return token

    def drawn(self, slot: int, token: int) -> SlotLogprobs | None:
        """Return the log probabilities of a token that a slot drew, if it asks for them."""
        if slot not in self.asks:
            return None
        sampling, asks = self.asks[slot]
        if sampling.logprobs is None or asks.pooling is not None:
            return None
        tokens = np.array([token], np.int32)
        return SlotLogprobs(
            slot, *rows(tokens, sampling.logprobs, sampling.logprob_token_ids, self.vocab_size)
        )

    def prompt(self, chunk: PrefillChunk) -> SlotLogprobs | None:
        """Return the log probabilities of the tokens behind a chunk's, if the prompt's are asked for."""
        asks = self.asks[chunk.slot][1]
        if asks.prompt_logprobs is None:
            return None
        start = chunk.start + 1
        tokens = asks.tokens[start : min(start + len(chunk.tokens), asks.prompt_tokens)]
        if not len(tokens):
            return None
        return SlotLogprobs(chunk.slot, *rows(tokens, asks.prompt_logprobs, (), self.vocab_size), start)

    def pooled(self, chunk: PrefillChunk, known: Int32) -> SlotVector | None:
        """Return a prompt's vector with its last chunk; `known` are all its tokens so far, as KV says."""
        slot, asks = chunk.slot, self.asks[chunk.slot][1]
        if asks.pooling is None or (asks.pooling is Pooling.LAST and not chunk.last):
            return None
        if asks.pooling is Pooling.LAST:
            vector = hidden_states(known, len(known) - 1)[0]
        else:
            vector = self.sums.pop(slot, np.zeros(HIDDEN_SIZE, np.float32))
            vector = vector + hidden_states(known, chunk.start).sum(axis=0)
            if not chunk.last:
                self.sums[slot] = vector
                return None
            vector = vector / np.float32(len(known))
        return SlotVector(slot, vector / np.linalg.norm(vector) if asks.normalize else vector)

    def side(self, chunks: list[tuple[PrefillChunk, Int32]], drawn: dict[int, int]) -> SideOutputs:
        """Return what a step gives beside its tokens.

        Args:
            chunks: its chunks, each with all tokens of its slot up to its end.
            drawn: what slots drew.
        """
        asked = [(chunk, known) for chunk, known in chunks if chunk.slot in self.asks]
        logprobs = [self.prompt(chunk) for chunk, _ in asked]
        logprobs += [self.drawn(slot, token) for slot, token in drawn.items()]
        vectors = [self.pooled(chunk, known) for chunk, known in asked]
        return SideOutputs(
            tuple(part for part in logprobs if part is not None),
            tuple(vector for vector in vectors if vector is not None),
        )
