"""Scheduling policies: the order in which waiting requests are admitted. One function per policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mizzen.core.sequence import SequenceState as Waiting

REORDER_WINDOW = 128
"""Number of requests at the head of the queue that a policy may reorder; bounds its cost."""
MAX_OVERTAKES = 4 * REORDER_WINDOW
"""Number of admissions that may overtake a request before it goes first."""


class Prefix(Protocol):
    """The cached prefix of a request."""

    @property
    def pages(self) -> int:
        """Number of cached pages."""
        ...

    def path(self) -> Sequence[Hashable]:
        """Return the nodes of the radix tree that hold these pages, from the root."""
        ...


class Prefixes(Protocol):
    """Lookup of cached prefixes."""

    def cached_prefix(self, waiting: Waiting) -> Prefix:
        """Return the cached prefix of a request."""
        ...


Policy = Callable[[Sequence["Waiting"], int, Prefixes], Iterable["Waiting"]]
"""Maps the head of the queue (oldest first), the number of admissions so far and a prefix lookup to the order
of admission."""


def may_be_overtaken(waiting: Waiting, admissions: int) -> bool:
    """Return whether other requests may still be admitted before this one."""
    return admissions - waiting.admissions_before < MAX_OVERTAKES


def first_come_first_served(
    waiting: Sequence[Waiting], admissions: int, prefixes: Prefixes
) -> Iterable[Waiting]:
    """Order requests by arrival."""
    return waiting


def longest_prefix_match(
    waiting: Sequence[Waiting], admissions: int, prefixes: Prefixes
) -> Iterable[Waiting]:
    """Order by length of the cached prefix, longest first, then by arrival; starved requests go first."""

    def rank(sequence: Waiting) -> tuple[bool, int]:
        patient = may_be_overtaken(sequence, admissions)
        return patient, -prefixes.cached_prefix(sequence).pages if patient else 0

    return sorted(waiting, key=rank)


def depth_first_by_weight(
    waiting: Sequence[Waiting], admissions: int, prefixes: Prefixes
) -> Iterable[Waiting]:
    """Order requests depth-first along the radix tree, at each node the branch with the largest weight first.

    The weight of a branch is the number of cached pages of all requests that wait below it. Requests that
    share a prefix run consecutively, before it is evicted. Ties go by arrival; starved requests go first.
    """
    known = [prefixes.cached_prefix(sequence) for sequence in waiting]
    paths = [prefix.path() for prefix in known]
    weights: Counter[Hashable] = Counter()
    seen: dict[Hashable, int] = {}
    for prefix, path in zip(known, paths, strict=True):
        for node in path:
            weights[node] += prefix.pages
            seen.setdefault(node, len(seen))

    def rank(index: int) -> tuple[bool, tuple[tuple[int, int], ...]]:
        if not may_be_overtaken(waiting[index], admissions):
            return False, ()
        branches = tuple((-weights[node], seen[node]) for node in paths[index])
        return True, (*branches, (1, index))  # requests that end at a node come after its branches

    return [waiting[index] for index in sorted(range(len(waiting)), key=rank)]


POLICIES: dict[str, Policy] = {
    "fcfs": first_come_first_served,
    "lpm": longest_prefix_match,
    "dfs-weight": depth_first_by_weight,
    "priority": first_come_first_served,
}
RANKED = frozenset({"priority"})
"""Policies under which requests of a higher priority go first and may preempt running ones."""
