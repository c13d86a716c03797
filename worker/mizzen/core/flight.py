"""Steps that are launched and not yet complete, and what waits for them: the fences."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from mizzen.core.decode import Frame
from mizzen.core.radix import Node
from mizzen.core.request import Int32
from mizzen.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Release:
    """What an ended (or retracted) request held, or only pages that it swapped for the tree's."""

    pages: Int32
    slot: int | None = None
    node: Node | None = None


class SampledRow(NamedTuple):
    """A request that samples from its last chunk, as the columns of `Frame` have it."""

    slot: int
    rid: int
    prompt: int
    bits: int
    length: int
    """Position of the chunk's last token."""


@dataclass(slots=True)
class Flight:
    """One launched step."""

    step: int
    frame: Frame
    lengths: Int32
    """Of the frame's rows before the step: the positions that it runs."""
    sampled: list[SampledRow] = field(default_factory=list)
    """Rows behind the frame's: requests whose last chunk it runs, in order."""
    leaving: list[Sequence] = field(default_factory=list)
    """Requests whose last token it samples."""
    dropped: list[int] = field(default_factory=list)
    """Slots whose tokens nobody wants any more."""
    releases: list[Release] = field(default_factory=list)
    """To be done when it is complete."""


class Flights:
    """The launched steps, oldest first. Step numbers have no gap."""

    def __init__(self) -> None:
        self.launched = 0
        self.completed = 0
        self._queue: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def launch(self, flight: Flight) -> None:
        """Append the next step."""
        self.launched = flight.step
        self._queue.append(flight)

    def land(self, step: int) -> Flight:
        """Remove and return the oldest step.

        Raises:
            ValueError: `step` is not the oldest in flight.
        """
        if not self._queue or self._queue[0].step != step:
            expected = self._queue[0].step if self._queue else "none"
            raise ValueError(f"tokens of step {step} came, the oldest step in flight is {expected}")
        self.completed = step
        return self._queue.popleft()

    def fence(self, release: Release, last_step: int) -> bool:
        """Put a release behind the last step that may use it; False when that is complete already."""
        if last_step <= self.completed:
            return False
        self._queue[last_step - self.completed - 1].releases.append(release)
        return True

    def drop(self, slot: int, first_step: int, last_step: int) -> int:
        """Let the tokens that the steps in flight sample for a slot be passed over; return how many."""
        first = max(first_step, self.completed + 1)
        for step in range(first, last_step + 1):
            self._queue[step - self.completed - 1].dropped.append(slot)
        return max(last_step + 1 - first, 0)

    def pending(self) -> bool:
        """Tell whether some step's completion will give something back."""
        return any(flight.releases or flight.leaving for flight in self._queue)

    def releases(self) -> list[Release]:
        """Return all that waits for a fence."""
        return [release for flight in self._queue for release in flight.releases]
