"""Steps that are launched and not yet complete, and what waits for them: the fences."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mizzen.core.decode import Column, Frame
from mizzen.core.plan import StepTokens
from mizzen.core.radix import Node
from mizzen.core.request import Int32, Int64
from mizzen.core.sequence import Sequence


class Rows(NamedTuple):
    """What a step sampled, a row for each token that somebody waits for."""

    columns: Int64
    """int64 [len(Column), rows]."""
    positions: Int64
    tokens: Int32


class Release(NamedTuple):
    """What an ended (or retracted) request held, or only pages that it swapped for the tree's."""

    pages: Int32
    slot: int | None = None
    node: Node | None = None


@dataclass(slots=True)
class Flight:
    """One launched step."""

    step: int
    frame: Frame
    positions: Int64
    """Of the tokens that the frame's rows sample."""
    sampled: list[tuple[int, ...]] = field(default_factory=list)
    """Requests whose last chunk it runs, in order: their columns, as in the frame."""
    sampled_positions: list[int] = field(default_factory=list)
    """Of the tokens that these sample."""
    leaving: list[Sequence] = field(default_factory=list)
    """Requests whose last token it samples."""
    dropped: list[int] = field(default_factory=list)
    """Token cells (`Column.CELL`) of the requests that nobody waits for any more."""
    releases: list[Release] = field(default_factory=list)
    """To be done when it is complete."""

    def rows(self, result: StepTokens) -> Rows:
        """Join a step's tokens to the requests that wait for them.

        Raises:
            ValueError: there are more or fewer than the step samples, or several a row.
        """
        columns, positions = self.frame.columns, self.positions
        if self.sampled:
            columns = np.concatenate((columns, np.array(self.sampled, np.int64).T), axis=1)
            positions = np.concatenate((positions, self.sampled_positions))
        if result.counts is not None or result.tokens.shape != (len(positions), 1):
            raise ValueError(
                f"step {self.step} samples {len(positions)} tokens, one a row; the shape of its tokens is "
                f"{result.tokens.shape}"
            )
        tokens = result.tokens.reshape(-1)
        if not self.dropped:
            return Rows(columns, positions, tokens)
        cells = columns[Column.CELL]
        wanted = cells != self.dropped[0]
        for cell in self.dropped[1:]:
            wanted &= cells != cell
        rows = wanted.nonzero()[0]
        return Rows(columns.take(rows, axis=1), positions.take(rows), tokens.take(rows))


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

    def drop(self, cell: int, first_step: int, last_step: int) -> int:
        """Let the tokens that the steps in flight sample for a request be passed over; return how many."""
        first = max(first_step, self.completed + 1)
        for step in range(first, last_step + 1):
            self._queue[step - self.completed - 1].dropped.append(cell)
        return max(last_step + 1 - first, 0)

    def pending(self) -> bool:
        """Tell whether some step's completion will give something back."""
        return any(flight.releases or flight.leaving for flight in self._queue)

    def releases(self) -> list[Release]:
        """Return all that waits for a fence."""
        return [release for flight in self._queue for release in flight.releases]
