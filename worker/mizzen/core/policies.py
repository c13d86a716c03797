"""Which waiting request is tried first: one small function each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mizzen.core.sequence import Sequence as Waiting

WINDOW = 128
"""Requests at the head of the queue that a policy may reorder; bounds its cost."""
PATIENCE = 4 * WINDOW
"""Admissions after which a request that was overtaken goes first."""

CachedPages = Callable[["Waiting"], int]
Policy = Callable[[Sequence["Waiting"], int, CachedPages], Iterable["Waiting"]]
"""From the head of the queue (oldest first), the number of admissions so far and a look into the prefix cache
to the order of admission."""


def first_come_first_served(
    waiting: Sequence[Waiting], admissions: int, cached: CachedPages
) -> Iterable[Waiting]:
    """Oldest first."""
    return waiting


def longest_prefix_match(
    waiting: Sequence[Waiting], admissions: int, cached: CachedPages
) -> Iterable[Waiting]:
    """Longest cached prefix first, among equals the oldest; who lost patience goes before all."""

    def rank(sequence: Waiting) -> tuple[bool, int]:
        patient = admissions - sequence.admissions_before < PATIENCE
        return patient, -cached(sequence) if patient else 0

    return sorted(waiting, key=rank)


POLICIES: dict[str, Policy] = {"fcfs": first_come_first_served, "lpm": longest_prefix_match}
