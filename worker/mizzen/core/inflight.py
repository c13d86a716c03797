"""Steps in flight, and the frees deferred until they are complete (fences).

The scheduler launches step N+1 before it reads the tokens of step N. Slots and pages freed meanwhile may
still be in use by a launched step, so each is reusable only after the last step that may use it.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct, field

from mizzen.core.decode_batch import DecodeFrame
from mizzen.core.kv.radix_node import RadixNode
from mizzen.core.request import Int32, Int64
from mizzen.core.sequence import SequencePhase, SequenceState
from mizzen.core.step_plan import StepTokens


class DeferredFree(Struct, frozen=True):
    """Slot and pages of a finished (or retracted) request, or pages it replaced by the prefix cache's."""

    slot: int = -1
    """Slot to free; -1 if none."""
    node: RadixNode | None = None
    """Prefix-cache node to unlock, after the request's own pages are cached below it."""
    cached_columns: int = 0
    """Number of leading page-table columns whose pages are full of known tokens: these are cached."""
    held_columns: int = 0
    """Number of page-table columns in use; pages from `cached_columns` on are freed."""
    pages: Int32 | None = None
    """Pages to free."""


class InflightStep(Struct):
    """One launched step."""

    step: int
    frame: DecodeFrame
    rows: Int64
    """Slots that the step samples a token for, int64 [samples], in the order of its tokens."""
    finishing: list[SequenceState]
    """Requests whose last token (by length) this step samples."""
    launch_time: float
    """Time of launch in seconds."""
    prompt_tokens: int
    """Number of prompt tokens that the step computes."""
    discarded: list[int] = field(default_factory=list)
    """Slots whose token is to be discarded, because the request left them after the launch."""
    deferred_frees: list[DeferredFree] = field(default_factory=list)
    """Frees to carry out when the step is complete."""

    def tokens(self, result: StepTokens) -> Int32:
        """Return the step's tokens, int32 [samples].

        Raises:
            ValueError: the number of tokens differs from the number of rows, or a row has several.
        """
        count = len(self.rows)
        if result.counts is not None or result.tokens.shape != (count, 1):
            raise ValueError(
                f"step {self.step} samples {count} tokens, one a row; the shape of its tokens is "
                f"{result.tokens.shape}"
            )
        return result.tokens.reshape(-1)

    def kept_rows(self) -> Int64:
        """Return the indices of rows whose token is not discarded, int64 [n]. Needs a discarded slot."""
        rows = self.rows
        wanted = rows != self.discarded[0]
        for slot in self.discarded[1:]:
            wanted &= rows != slot
        return wanted.nonzero()[0]


class InflightSteps:
    """The launched and not yet complete steps, oldest first. Step numbers have no gap."""

    def __init__(self) -> None:
        self.launched = 0
        self.completed = 0
        self._queue: deque[InflightStep] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, flight: InflightStep) -> None:
        """Add the step that was just launched."""
        self.launched = flight.step
        self._queue.append(flight)

    def complete(self, step: int) -> InflightStep:
        """Remove and return the oldest step, which is now complete.

        Raises:
            ValueError: `step` is not the oldest in flight.
        """
        if not self._queue or self._queue[0].step != step:
            expected = self._queue[0].step if self._queue else "none"
            raise ValueError(f"tokens of step {step} came, the oldest step in flight is {expected}")
        self.completed = step
        return self._queue.popleft()

    def defer(self, release: DeferredFree, last_step: int) -> bool:
        """Defer a free until step `last_step` is complete; return False if it is complete already."""
        if last_step <= self.completed:
            return False
        self._queue[last_step - self.completed - 1].deferred_frees.append(release)
        return True

    def discard_tokens(self, slot: int, first_step: int, last_step: int) -> int:
        """Discard the tokens that steps first_step..last_step in flight sample for a slot; return their
        number."""
        count = 0
        for flight in self._queue:
            if first_step <= flight.step <= last_step:
                flight.discarded.append(slot)
                count += 1
        return count

    def frees_pending(self) -> bool:
        """Return whether the completion of a step in flight will free slots or pages."""
        return any(flight.deferred_frees or flight.finishing for flight in self._queue)

    def finishing(self) -> list[SequenceState]:
        """Return the requests whose last step (by length) is in flight."""
        return [s for flight in self._queue for s in flight.finishing if s.phase is SequencePhase.LEAVING]

    def deferred_frees(self) -> list[DeferredFree]:
        """Return all deferred frees."""
        return [release for flight in self._queue for release in flight.deferred_frees]
