"""Steps that are launched and not yet complete, and what waits for them: the fences."""

from __future__ import annotations

from collections import deque

from msgspec import Struct, field

from mizzen.core.decode_batch import Frame
from mizzen.core.kv.radix_node import Node
from mizzen.core.request import Int32, Int64
from mizzen.core.sequence import Phase, Sequence
from mizzen.core.step_plan import StepTokens


class Release(Struct, frozen=True):
    """What an ended (or retracted) request held, or only pages that it swapped for the tree's."""

    slot: int = -1
    """To be free again."""
    node: Node | None = None
    """To be unlocked, once the pages behind it are in the tree."""
    full: int = 0
    """Columns of the slot's row whose pages are full of known tokens: those are cached."""
    held: int = 0
    """Columns of the row in all: the rest is given back."""
    pages: Int32 | None = None
    """To be given back."""


class Flight(Struct):
    """One launched step."""

    step: int
    frame: Frame
    rows: Int64
    """The slots that it samples a token for, in the order of its tokens."""
    leaving: list[Sequence]
    """Requests whose last token it samples."""
    launched: float
    """When, in seconds."""
    prompt_tokens: int
    """How many it runs."""
    dropped: list[int] = field(default_factory=list)
    """Slots whose token nobody waits for any more."""
    releases: list[Release] = field(default_factory=list)
    """To be done when it is complete."""

    def tokens(self, result: StepTokens) -> Int32:
        """Return a step's tokens, one a slot.

        Raises:
            ValueError: there are more or fewer than the step samples, or several a row.
        """
        count = len(self.rows)
        if result.counts is not None or result.tokens.shape != (count, 1):
            raise ValueError(
                f"step {self.step} samples {count} tokens, one a row; the shape of its tokens is "
                f"{result.tokens.shape}"
            )
        return result.tokens.reshape(-1)

    def wanted(self) -> Int64:
        """Return the rows whose token somebody waits for."""
        rows = self.rows
        wanted = rows != self.dropped[0]
        for slot in self.dropped[1:]:
            wanted &= rows != slot
        return wanted.nonzero()[0]


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
        """Let the tokens that the steps in flight sample for a request be passed over; return how many."""
        count = 0
        for flight in self._queue:
            if first_step <= flight.step <= last_step:
                flight.dropped.append(slot)
                count += 1
        return count

    def pending(self) -> bool:
        """Tell whether some step's completion will give something back."""
        return any(flight.releases or flight.leaving for flight in self._queue)

    def leaving(self) -> list[Sequence]:
        """Return the requests whose last step is in flight."""
        return [s for flight in self._queue for s in flight.leaving if s.phase is Phase.LEAVING]

    def releases(self) -> list[Release]:
        """Return all that waits for a fence."""
        return [release for flight in self._queue for release in flight.releases]
