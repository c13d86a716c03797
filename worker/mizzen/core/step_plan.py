"""The contract between scheduler and runners: step plans, their results, and the `Runner` protocol.

A plan is complete in itself: device state (page table, lengths, last tokens, sampling parameters, all indexed
by slot) plus plans in order give the same result on every rank. Sequence positions count from 0.

Order inside a step:

    pages      page-table cells are written
    starts     slots are assigned to new (or resumed) requests
    forward    decode slots (one token each), then prefill chunks, as one mixed batch
    sample     one token for each decode slot, then one for each chunk whose `last` is set
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from mizzen.core.request import Int32, Pooling
from mizzen.core.sampling_params import SamplingParams

Float32 = NDArray[np.float32]


def no_ints() -> Int32:
    """Return an empty int32 array."""
    return np.empty(0, dtype=np.int32)


class PageWrites(Struct, frozen=True):
    """Page-table cells to set: `page_table[slots[i], columns[i]] = pages[i]`, each int32 [n]."""

    slots: Int32 = field(default_factory=no_ints)
    columns: Int32 = field(default_factory=no_ints)
    pages: Int32 = field(default_factory=no_ints)


class SlotOptions(Struct, frozen=True, kw_only=True):
    """Options of a request beyond temperature, top-k, top-p and min-p. Most requests have none."""

    tokens: Int32
    """Known token ids, int32 [n]: the prompt, then output that exists already."""
    prompt_tokens: int
    """Number of leading `tokens` that belong to the prompt; the others are output."""
    end_tokens: tuple[int, ...] = ()
    """Token ids that end the request, ascending."""
    prompt_logprobs: int | None = None
    """Number of most probable tokens to report at each prompt position, beside the prompt token; None reports
    nothing."""
    pooling: Pooling | None = None
    """Pooling of the prompt's hidden states into one reported vector; None for generation."""
    normalize: bool = False
    """Whether the pooled vector is scaled to length 1."""


class SlotStart(Struct, frozen=True, kw_only=True):
    """Assignment of a slot to a request: sets its length (tokens whose KV exists) and sampling parameters.

    The token at sequence position p is sampled with the random number of (seed, p), so a retracted and
    resumed request continues exactly as it would have.
    """

    slot: int
    length: int
    sampling: SamplingParams
    seed: int
    output_tokens: int = 0
    """Number of trailing known tokens (those with KV and those of its chunks) that are output already."""
    options: SlotOptions | None = None


class PrefillChunk(Struct, frozen=True, kw_only=True):
    """Known tokens, int32 [n], of one slot at positions start..start+n-1; KV of positions 0..start-1 exists.

    If `last` is set, the slot samples its next token from the chunk's last position, and it may be a decode
    slot from the next step on.
    """

    slot: int
    start: int
    tokens: Int32
    last: bool


class StepPlan(Struct, frozen=True, kw_only=True):
    """One forward pass over a mixed batch."""

    step: int
    """Step number: 1, 2, 3, ... without a gap."""
    decode: Int32
    """Slots, int32 [n], that each compute one token: the one sampled last, at position `length`."""
    decode_version: int
    """Version of `decode`; equal in consecutive plans exactly if `decode` is equal, so the device may keep
    its batch."""
    pages: PageWrites
    starts: tuple[SlotStart, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()

    @property
    def samples(self) -> int:
        """Number of tokens that the step samples."""
        return len(self.decode) + sum(chunk.last for chunk in self.prefill)


class SlotLogprobs(Struct, frozen=True):
    """Log probabilities of n tokens of a slot, m entries each.

    The first entry of a token is the token itself; the most probable tokens follow, then those requested by
    id.
    """

    slot: int
    ids: Int32
    """Token ids, int32 [n, m]."""
    values: Float32
    """Log probabilities, float32 [n, m]."""
    start: int | None = None
    """Sequence position of the first prompt token; None for the token that the step sampled."""


class SlotVector(Struct, frozen=True):
    """The pooled hidden state of a slot's prompt."""

    slot: int
    vector: Float32
    """float32 [hidden size]."""


class SideOutputs(Struct, frozen=True):
    """Outputs of a step other than tokens, for slots that requested them."""

    logprobs: tuple[SlotLogprobs, ...] = ()
    vectors: tuple[SlotVector, ...] = ()


class StepTokens(Struct, frozen=True):
    """Tokens that a step sampled, int32 [samples, k]; the first `counts[i]` (int32 [samples]) of row i are
    valid.

    `counts` is None if every row has exactly one token (k = 1, no speculation).
    """

    step: int
    tokens: Int32
    counts: Int32 | None = None
    side_outputs: SideOutputs | None = None


class Runner(Protocol):
    """Executes plans in order. `launch` returns at once; up to D steps are in flight.

    Used from one thread. An error of a step surfaces from `collect`.
    """

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step after those in flight."""
        ...

    def ready(self) -> bool:
        """Return whether `collect` would return without waiting."""
        ...

    def collect(self) -> StepTokens:
        """Wait for the oldest step in flight and return its tokens."""
        ...

    def close(self) -> None:
        """Wait for the steps in flight and release the device."""
        ...
