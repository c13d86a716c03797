# SPDX-License-Identifier: Apache-2.0
"""The contract between scheduler and runners: step plans, their results, and the `Runner` protocol.

A runner needs nothing but the plans, in order: they update its device state (page table, lengths, last tokens
and sampling parameters, all indexed by slot) identically on every rank. Sequence positions count from 0.

Order inside a step:

    pages      page-table entries are written
    starts     slots are assigned to new (or resumed) requests
    images     embeddings of images are dropped, then others are computed
    forward    decode slots (one token each), then prefill chunks, as one mixed batch
    sample     one token for each decode slot, then one for each chunk whose `samples` is true
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from mizzen.core.images.types import ChunkImage, ImageEncoding
from mizzen.core.request import Int32, Pooling
from mizzen.core.sampling_params import SamplingParams

Float32 = NDArray[np.float32]


def no_ints() -> Int32:
    """Return an empty int32 array."""
    return np.empty(0, dtype=np.int32)


class PageWrites(Struct, frozen=True):
    """Page-table entries to set: `page_table[slots[i], columns[i]] = pages[i]`, each int32 [n]."""

    slots: Int32 = field(default_factory=no_ints)
    columns: Int32 = field(default_factory=no_ints)
    pages: Int32 = field(default_factory=no_ints)


class SlotOptions(Struct, frozen=True, kw_only=True):
    """Options of a request beyond temperature, top-k, top-p and min-p. Most requests have none."""

    tokens: Int32
    """Known token ids, int32 [n]: the prompt, followed by the output of a resumed request."""
    prompt_tokens: int
    """Number of leading `tokens` that belong to the prompt."""
    end_tokens: tuple[int, ...] = ()
    """Token ids that end the request, ascending."""
    prompt_logprobs: int | None = None
    """Number of most probable tokens to report for each prompt token, in addition to the token itself; None
    reports no prompt log probabilities."""
    prompt_logprobs_from: int = 1
    """Sequence position of the first prompt token whose log probabilities are reported."""
    pooling: Pooling | None = None
    """Pooling for an embedding request; None for a generation request."""
    normalize: bool = False
    """Whether the embedding is scaled to length 1."""
    second_start: int = 0
    """Index of the first token of the second part of a pair; 0 without one."""
    classify: bool = False
    """Whether a classifier's logits are computed from the pooled hidden state."""


class SlotStart(Struct, frozen=True, kw_only=True):
    """Assignment of a slot to a request, with the request's initial state.

    The token at sequence position p is sampled with a random number derived from (seed, p), so a retracted
    and resumed request continues exactly as if it had not been retracted.
    """

    slot: int
    length: int
    """Number of tokens whose KV already exists, because their pages come from the prefix cache."""
    sampling: SamplingParams
    seed: int
    output_tokens: int = 0
    """Number of output tokens among the request's known tokens; 0 unless the request resumes."""
    options: SlotOptions | None = None
    """Options beyond temperature, top-k, top-p and min-p; None for most requests."""
    rotary_offset: int = 0
    """Difference between the rotary position and the sequence position of output tokens; not 0 only after
    images in models with three rotary positions for each token."""


class PrefillChunk(Struct, frozen=True, kw_only=True):
    """Consecutive known tokens of one slot; the step computes their KV."""

    slot: int
    start: int
    """Sequence position of the first token; the KV of all earlier positions exists."""
    tokens: Int32
    """Token ids, int32 [n], of positions start..start+n-1."""
    last: bool
    """Whether the chunk ends with the last known token."""
    images: tuple[ChunkImage, ...] = ()
    """Embeddings that replace tokens of the chunk; the ids of these tokens in `tokens` are negative."""
    rotary: Int32 | None = None
    """Rotary positions (time, height, width) of the tokens, int32 [3, n]; None if all three equal the
    sequence position."""
    pools: bool = False
    """Whether the request only pools hidden states: the step then samples no token after the last chunk."""

    @property
    def samples(self) -> bool:
        """Whether the step samples the slot's next token after this chunk; the slot may then decode from the
        next step on."""
        return self.last and not self.pools


class StepPlan(Struct, frozen=True, kw_only=True):
    """Complete description of a step: one forward pass over a mixed batch of decodes and prefill chunks."""

    step: int
    """Step number; consecutive from 1."""
    decode: Int32
    """Slots that decode, int32 [n]. The step's input is the token that each slot sampled last; the token's
    sequence position is the slot's length."""
    decode_version: int
    """Version of `decode`: if two consecutive plans have the same version, their `decode` is equal, and the
    batch on the device need not be updated."""
    pages: PageWrites
    starts: tuple[SlotStart, ...] = ()
    """Requests that start in slots. A request whose image is being encoded may have no chunk in the step."""
    prefill: tuple[PrefillChunk, ...] = ()
    dropped_images: tuple[bytes, ...] = ()
    """Digests of images whose embeddings are dropped before the step."""
    encodings: tuple[ImageEncoding, ...] = ()
    """Images to encode before the forward pass, whose embeddings are then kept."""

    @property
    def samples(self) -> int:
        """Number of tokens that the step samples."""
        return len(self.decode) + sum(chunk.samples for chunk in self.prefill)


class SlotLogprobs(Struct, frozen=True):
    """Log probabilities at n consecutive positions of a slot, with m entries per position.

    The first entry is the prompt or sampled token itself; then follow the most probable tokens, then the
    tokens of `logprob_token_ids`.
    """

    slot: int
    ids: Int32
    """Token ids, int32 [n, m]."""
    values: Float32
    """Log probabilities, float32 [n, m]."""
    start: int | None = None
    """Sequence position of the first prompt token; None if the entries are for the sampled token instead."""


class SlotVector(Struct, frozen=True):
    """The embedding of the prompt in a slot, or the logits of its labels."""

    slot: int
    vector: Float32
    """The vector, float32 [size]."""


class SideOutputs(Struct, frozen=True):
    """Log probabilities and embeddings that a step returns, for the slots that requested them."""

    logprobs: tuple[SlotLogprobs, ...] = ()
    vectors: tuple[SlotVector, ...] = ()


class StepTokens(Struct, frozen=True):
    """Result of a step: the sampled tokens, and side outputs if a slot requested them."""

    step: int
    tokens: Int32
    """Token ids, int32 [samples, k]: a row has up to k tokens; k is 1 without speculation."""
    counts: Int32 | None = None
    """Number of valid tokens in each row, int32 [samples]; None if k is 1 and every row has one token."""
    side_outputs: SideOutputs | None = None


class Runner(Protocol):
    """Executes step plans in order, asynchronously; several steps may be in flight.

    All methods are called from one thread. `collect` raises the error of a failed step.
    """

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step after the steps in flight, and return at once."""
        ...

    def ready(self) -> bool:
        """Return whether `collect` would return without waiting."""
        ...

    def collect(self) -> StepTokens:
        """Wait for the oldest step in flight and return its tokens."""
        ...

    def close(self) -> None:
        """Wait for the steps in flight, then release the device."""
        ...
