"""What a step's prompt tokens go to: prompts that run, and requests that wait."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List

from mizzen.core.admission import Admission
from mizzen.core.plan_builder import Draft
from mizzen.core.policies import is_patient
from mizzen.core.sequence import Sequence


def fill(draft: Draft, prefilling: List[Sequence], admission: Admission, decodes: int) -> list[Sequence]:
    """Add chunks of prompts to a draft, those that run first; return the requests that join them.

    Args:
        draft: the step's.
        prefilling: requests that run and whose prompts have not been run whole, in the order of admission.
        admission: who waits.
        decodes: requests that run and decode.
    """
    for sequence in prefilling:
        if not draft.budget:
            return []
        draft.chunk(sequence)
    return admission.admit(draft, decodes + len(prefilling)) if admission.queue else []


def fill_by_rank(
    draft: Draft, prefilling: List[Sequence], admission: Admission, decodes: int
) -> list[Sequence]:
    """Do the same for policies that look at priority: a higher one goes first, whether it runs or waits.

    Nobody starves: a prompt that was overtaken too often while it ran goes before all.
    """
    queue, running = admission.queue, decodes + len(prefilling)
    joined: list[Sequence] = []
    for sequence in _by_rank(prefilling, admission.admissions):
        head = queue.head()
        if head is not None and head.rank > sequence.rank and not sequence.urgent:
            joined += admission.admit(draft, running + len(joined), above=sequence.rank)
        if not draft.budget:
            return joined
        draft.chunk(sequence)
    if queue:
        joined += admission.admit(draft, running + len(joined))
    return joined


def tokens_ahead(head: Sequence, prefilling: Iterable[Sequence]) -> int:
    """Return how many tokens of prompts that run go before a waiting request, by rank."""
    ahead = (one for one in prefilling if one.urgent or one.rank >= head.rank)
    return sum(len(one.tokens) - one.computed for one in ahead)


def _by_rank(prefilling: Iterable[Sequence], admissions: int) -> list[Sequence]:
    ordered = list(prefilling)
    for sequence in ordered:
        sequence.urgent = sequence.urgent or not is_patient(sequence, admissions)
    ordered.sort(key=lambda one: (not one.urgent, -one.rank, one.serial))
    return ordered
