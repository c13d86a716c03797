# SPDX-License-Identifier: Apache-2.0
"""Steps in flight, and frees of slots and pages that are deferred until these steps are complete.

The scheduler launches step N+1 before it reads the tokens of step N. A launched step may still use a slot or
page that is freed meanwhile. So the slot or page becomes reusable only when the last step that may use it is
complete.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct, field

from mizzen.common.request_timeline import RequestTimeline
from mizzen.core.decode_batch import DecodeFrame
from mizzen.core.kv.radix_node import RadixNode
from mizzen.core.request import Int32, Int64
from mizzen.core.sequence import SequencePhase, SequenceState
from mizzen.core.step_plan import PrefillChunk, StepTokens


class DeferredFree(Struct, frozen=True):
    """Slot and pages to free after a step: those of a finished or retracted request, or duplicate pages.

    Pages are duplicates if the prefix cache already held pages with the same tokens; `pages` lists them.
    """

    slot: int = -1
    """Slot to free; -1 if only `pages` are freed."""
    node: RadixNode | None = None
    """Prefix-cache node to unlock, after the request's own pages are cached below it."""
    cached_columns: int = 0
    """Number of leading page-table columns whose pages go to the prefix cache: they are full, and the ids of
    their tokens are known."""
    held_columns: int = 0
    """Number of page-table columns in use; pages from column `cached_columns` on are freed."""
    pages: Int32 | None = None
    """Duplicate pages to free, int32 [n]; None if a slot is freed."""


class InflightStep(Struct):
    """A launched step whose tokens have not been read."""

    step: int
    frame: DecodeFrame
    rows: Int64
    """Slots for which the step samples a token, int64 [samples], in the order of the tokens."""
    finishing: list[SequenceState]
    """Requests that reach their length limit with the token that this step samples, or pool hidden states."""
    launch_time: float
    """Time at which the step was launched, in seconds."""
    prompt_tokens: int
    """Number of prompt tokens in the step."""
    discarded: list[int] = field(default_factory=list)
    """Slots whose token is discarded: their request left after the launch."""
    deferred_frees: list[DeferredFree] = field(default_factory=list)
    """Frees that wait until this step is complete."""
    traced: tuple[tuple[RequestTimeline, int], ...] = ()
    """Timelines of traced requests whose last prefill chunk is in this step, with their numbers of
    preemptions at its launch."""

    def record_chunk(self, timeline: RequestTimeline, chunk: PrefillChunk) -> None:
        """Record in the timeline of a traced request that its prefill chunk was launched with this step."""
        timeline.launch_chunk(self.launch_time, chunk.start, len(chunk.tokens))
        if chunk.last:
            self.traced = (*self.traced, (timeline, timeline.preemption_count))

    def tokens(self, result: StepTokens) -> Int32:
        """Return the tokens in the result of this step, int32 [samples].

        Raises:
            ValueError: the result does not have exactly one token for each of `rows`.
        """
        count = len(self.rows)
        if result.counts is not None or result.tokens.shape != (count, 1):
            raise ValueError(
                f"step {self.step} samples {count} tokens, one per row, but the shape of its tokens is "
                f"{result.tokens.shape}"
            )
        return result.tokens.reshape(-1)

    def kept_rows(self) -> Int64:
        """Return the indices in `rows` of slots whose token is kept, int64 [n].

        `discarded` must not be empty.
        """
        rows = self.rows
        wanted = rows != self.discarded[0]
        for slot in self.discarded[1:]:
            wanted &= rows != slot
        return wanted.nonzero()[0]


class InflightSteps:
    """Queue of the steps in flight, oldest first. Step numbers are consecutive."""

    def __init__(self) -> None:
        self.launched = 0
        """Number of the last launched step; 0 before the first one."""
        self.completed = 0
        """Number of the last complete step; 0 before the first one."""
        self._queue: deque[InflightStep] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, inflight_step: InflightStep) -> None:
        """Add the step that was just launched."""
        self.launched = inflight_step.step
        self._queue.append(inflight_step)

    def complete(self, step: int) -> InflightStep:
        """Remove and return the oldest step, which is now complete.

        Raises:
            ValueError: `step` is not the oldest step in flight.
        """
        if not self._queue or self._queue[0].step != step:
            expected = self._queue[0].step if self._queue else "none"
            raise ValueError(f"got tokens of step {step}, but the oldest step in flight is {expected}")
        self.completed = step
        return self._queue.popleft()

    def defer(self, release: DeferredFree, last_step: int) -> bool:
        """Defer a free until `last_step` is complete; return False if that step is complete already."""
        if last_step <= self.completed:
            return False
        self._queue[last_step - self.completed - 1].deferred_frees.append(release)
        return True

    def discard_tokens(self, slot: int, first_step: int, last_step: int) -> int:
        """Discard a slot's tokens in all steps in flight from `first_step` to `last_step`, both included.

        Returns the number of discarded tokens.
        """
        count = 0
        for inflight_step in self._queue:
            if first_step <= inflight_step.step <= last_step:
                inflight_step.discarded.append(slot)
                count += 1
        return count

    def frees_pending(self) -> bool:
        """Return whether slots or pages will become free when the steps in flight are complete."""
        return any(inflight_step.deferred_frees or inflight_step.finishing for inflight_step in self._queue)

    def finishing(self) -> list[SequenceState]:
        """Return the requests that reach their length limit in a step in flight."""
        return [
            sequence
            for inflight_step in self._queue
            for sequence in inflight_step.finishing
            if sequence.phase is SequencePhase.LEAVING
        ]

    def deferred_frees(self) -> list[DeferredFree]:
        """Return the deferred frees of all steps in flight."""
        return [release for inflight_step in self._queue for release in inflight_step.deferred_frees]
