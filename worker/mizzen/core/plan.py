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

from mizzen.core.params import SamplingParams
from mizzen.core.request import Int32


def no_ints() -> Int32:
    """Return an empty int32 array."""
    return np.empty(0, dtype=np.int32)


class PageWrites(Struct, frozen=True):
    """Cells of the page table to set: `table[slots[i], columns[i]] = pages[i]`, each int32 [n]."""

    slots: Int32 = field(default_factory=no_ints)
    columns: Int32 = field(default_factory=no_ints)
    pages: Int32 = field(default_factory=no_ints)


class SlotStart(Struct, frozen=True, kw_only=True):
    """A request takes a slot: sets its length (tokens whose KV exists) and how it samples.

    A token at sequence position p is drawn with the random number of (seed, p), so a retracted and resumed
    request continues exactly as it would have.
    """

    slot: int
    length: int
    sampling: SamplingParams
    seed: int


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


class StepTokens(Struct, frozen=True):
    """What a step sampled: int32 [samples, k], k tokens a row; `counts` [samples] of them valid.

    `counts` is None while every row yields exactly one token (k = 1, no speculation).
    """

    step: int
    tokens: Int32
    counts: Int32 | None = None


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
