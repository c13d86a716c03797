"""What one step does: the scheduler writes plans, runners execute them.

A plan is complete in itself: device state (page table, lengths, last tokens, sampling parameters, all indexed
by slot) plus plans in order give the same result on every rank. Sequence positions count from 0.

Order inside a step, before the forward pass:

    pages      page-table cells are written
    starts     slots are taken over by a new (or resumed) request
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
    """Cells of the page table to set: `table[slots[i], columns[i]] = pages[i]`, each int32 [n]."""

    slots: Int32 = field(default_factory=no_ints)
    columns: Int32 = field(default_factory=no_ints)
    pages: Int32 = field(default_factory=no_ints)


class Asks(Struct, frozen=True, kw_only=True):
    """What a request wants of its slot beyond temperature and filters. Most want nothing and have none."""

    tokens: Int32
    """Ids [n] of all that is known: the prompt, and output that there is already."""
    prompt_tokens: int
    """How many of them are the prompt's; the others are output."""
    end_tokens: tuple[int, ...] = ()
    """Tokens that end the request."""
    prompt_logprobs: int | None = None
    """Report the log probabilities of the prompt's tokens, and those of so many most probable ones."""
    pooling: Pooling | None = None
    """Report one vector of the prompt's hidden states."""
    normalize: bool = False
    """Scale that vector to length 1."""


class SlotStart(Struct, frozen=True, kw_only=True):
    """A request takes a slot: sets its length (tokens whose KV exists) and how it samples.

    A token at sequence position p is drawn with the random number of (seed, p), so a retracted and resumed
    request continues exactly as it would have.
    """

    slot: int
    length: int
    sampling: SamplingParams
    seed: int
    output: int = 0
    """So many last ones of its known tokens (those of KV and of its chunks) are output already."""
    asks: Asks | None = None


class PrefillChunk(Struct, frozen=True, kw_only=True):
    """Tokens [n] of one slot at positions start..start+n-1, of known ids; KV of 0..start-1 exists.

    With `last`, the slot samples its next token from the chunk's last position, and from the next step on it
    may be among the decode slots.
    """

    slot: int
    start: int
    tokens: Int32
    last: bool


class StepPlan(Struct, frozen=True, kw_only=True):
    """One forward pass over a mixed batch."""

    step: int
    """1, 2, 3, ... without a gap."""
    decode: Int32
    """Slots [n] that each run one token: the one sampled last, at position `length`."""
    decode_version: int
    """Unchanged from the plan before exactly when `decode` is: the device may keep its batch."""
    pages: PageWrites
    starts: tuple[SlotStart, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()

    @property
    def samples(self) -> int:
        """Number of tokens that the step yields."""
        return len(self.decode) + sum(chunk.last for chunk in self.prefill)


class SlotLogprobs(Struct, frozen=True):
    """Log probabilities of n tokens of a slot, m entries each.

    A token's first entry is the token itself, then come the most probable ones, then those asked for by id.
    """

    slot: int
    ids: Int32
    """[n, m]."""
    values: Float32
    """[n, m]."""
    start: int | None = None
    """Sequence position of the first, where they are the prompt's; None: of the token that was drawn."""


class SlotVector(Struct, frozen=True):
    """The pooled hidden state of a slot's prompt."""

    slot: int
    vector: Float32
    """[hidden size]."""


class Side(Struct, frozen=True):
    """What a step gives beside its tokens, for slots that asked."""

    logprobs: tuple[SlotLogprobs, ...] = ()
    vectors: tuple[SlotVector, ...] = ()


class StepTokens(Struct, frozen=True):
    """What a step sampled: int32 [samples, k], k tokens a row; `counts` [samples] of them valid.

    `counts` is None while every row yields exactly one token (k = 1, no speculation).
    """

    step: int
    tokens: Int32
    counts: Int32 | None = None
    side: Side | None = None


class Runner(Protocol):
    """Executes plans in order. `launch` returns at once; up to D steps are in flight.

    Used from one thread. An error of a step surfaces from `collect`.
    """

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step behind those in flight."""
        ...

    def ready(self) -> bool:
        """Tell whether `collect` would return without waiting."""
        ...

    def collect(self) -> StepTokens:
        """Wait for the oldest step in flight and return its tokens."""
        ...

    def close(self) -> None:
        """Wait for what is in flight and free the device."""
        ...
