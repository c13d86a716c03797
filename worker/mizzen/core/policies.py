# SPDX-License-Identifier: Apache-2.0
"""Scheduling policies: the order in which waiting requests are admitted. One function per policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mizzen.core.sequence import SequenceState as Waiting

REORDER_WINDOW = 128
"""Number of requests at the head of the queue that a policy may reorder; this bounds the policy's cost."""
MAX_OVERTAKES = 4 * REORDER_WINDOW
"""Number of later requests that may be admitted ahead of a waiting one; then the waiting one goes first."""


class Prefix(Protocol):
    """The part of a request's tokens that the prefix cache holds."""

    @property
    def pages(self) -> int:
        """Number of cached pages."""
        ...

    def path(self) -> Sequence[Hashable]:
        """Return the path of radix-tree nodes that hold the cached pages, starting at the root."""
        ...


class Prefixes(Protocol):
    """Looks up cached prefixes of waiting requests."""

    def cached_prefix(self, waiting: Waiting) -> Prefix:
        """Return the cached prefix of a request."""
        ...


Policy = Callable[[Sequence["Waiting"], int, Prefixes], Iterable["Waiting"]]
"""A scheduling policy: returns requests in the order in which they should be admitted.

Its arguments are the requests at the head of the queue (oldest first), the number of admissions so far, and a
lookup of cached prefixes."""


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
    """Order requests by length of the cached prefix (longest first), then by arrival.

    Requests that must not be overtaken any more precede all others.
    """

    def rank(sequence: Waiting) -> tuple[bool, int]:
        reorderable = may_be_overtaken(sequence, admissions)
        return reorderable, -prefixes.cached_prefix(sequence).pages if reorderable else 0

    return sorted(waiting, key=rank)


def depth_first_by_weight(
    waiting: Sequence[Waiting], admissions: int, prefixes: Prefixes
) -> Iterable[Waiting]:
    """Order requests depth-first along the radix tree, visiting branches with the largest weight first.

    The weight of a branch is the sum of the cached pages of all waiting requests whose prefix lies in it. So
    requests with a common prefix run one after another, before the prefix is evicted. Branches of equal
    weight are ordered by arrival. Requests that must not be overtaken any more precede all others.
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
        return True, (*branches, (1, index))  # a request that ends at a node comes after the node's branches

    return [waiting[index] for index in sorted(range(len(waiting)), key=rank)]


POLICIES: dict[str, Policy] = {
    "fcfs": first_come_first_served,
    "lpm": longest_prefix_match,
    "dfs-weight": depth_first_by_weight,
    "priority": first_come_first_served,
}
RANKED = frozenset({"priority"})
"""Policies under which a request precedes waiting requests of lower priority and may preempt running ones."""
