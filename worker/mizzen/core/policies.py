"""Which waiting request is tried first: one small function each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mizzen.core.sequence import Sequence as Waiting

WINDOW = 128
"""Requests at the head of the queue that a policy may reorder; bounds its cost."""
PATIENCE = 4 * WINDOW
"""Admissions after which a request that was overtaken goes first."""


class Prefix(Protocol):
    """What the prefix cache holds of a request."""

    @property
    def pages(self) -> int:
        """How many of its pages."""
        ...

    def path(self) -> Sequence[Hashable]:
        """Return the nodes of the prefix tree, from the root, that hold these pages."""
        ...


class Prefixes(Protocol):
    """A look into the prefix cache."""

    def known(self, waiting: Waiting) -> Prefix:
        """Return what is cached of a request."""
        ...


Policy = Callable[[Sequence["Waiting"], int, Prefixes], Iterable["Waiting"]]
"""From the head of the queue (oldest first), the number of admissions so far and a look into the prefix cache
to the order of admission."""


def is_patient(waiting: Waiting, admissions: int) -> bool:
    """Tell whether a request may still be overtaken."""
    return admissions - waiting.admissions_before < PATIENCE


def first_come_first_served(
    waiting: Sequence[Waiting], admissions: int, prefixes: Prefixes
) -> Iterable[Waiting]:
    """Oldest first."""
    return waiting


def longest_prefix_match(
    waiting: Sequence[Waiting], admissions: int, prefixes: Prefixes
) -> Iterable[Waiting]:
    """Longest cached prefix first, among equals the oldest; who lost patience goes before all."""

    def rank(sequence: Waiting) -> tuple[bool, int]:
        patient = is_patient(sequence, admissions)
        return patient, -prefixes.known(sequence).pages if patient else 0

    return sorted(waiting, key=rank)


def depth_first_by_weight(
    waiting: Sequence[Waiting], admissions: int, prefixes: Prefixes
) -> Iterable[Waiting]:
    """Those below one node of the prefix tree in a row, at each node the branch first that saves most.

    A branch saves the cached pages of all who wait below it. What one of them brings into the cache serves
    the next ones before it is evicted. Among equals the oldest goes first, and who lost patience before all.
    """
    known = [prefixes.known(sequence) for sequence in waiting]
    paths = [prefix.path() for prefix in known]
    weights: Counter[Hashable] = Counter()
    seen: dict[Hashable, int] = {}
    for prefix, path in zip(known, paths, strict=True):
        for node in path:
            weights[node] += prefix.pages
            seen.setdefault(node, len(seen))

    def rank(index: int) -> tuple[bool, tuple[tuple[int, int], ...]]:
        if not is_patient(waiting[index], admissions):
            return False, ()
        branches = tuple((-weights[node], seen[node]) for node in paths[index])
        return True, (*branches, (1, index))  # a node's own requests come behind its branches

    return [waiting[index] for index in sorted(range(len(waiting)), key=rank)]


POLICIES: dict[str, Policy] = {
    "fcfs": first_come_first_served,
    "lpm": longest_prefix_match,
    "dfs-weight": depth_first_by_weight,
    "priority": first_come_first_served,
}
RANKED = frozenset({"priority"})
"""Policies that apply among requests of one priority: a higher one goes first, and may preempt."""
