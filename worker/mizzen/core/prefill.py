# SPDX-License-Identifier: Apache-2.0
"""Distributes the prefill budget of a step among running prefills and waiting requests."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List

from mizzen.core.admission import PrefillAdmission
from mizzen.core.plan_builder import PlanBuilder
from mizzen.core.policies import may_be_overtaken
from mizzen.core.sequence import SequenceState


def fill_prefill(
    builder: PlanBuilder, prefilling: List[SequenceState], admission: PrefillAdmission, decodes: int
) -> list[SequenceState]:
    """Add chunks of running prefills to a plan, then use the rest of the budget to admit waiting requests.

    Returns the newly admitted requests.

    Args:
        builder: the plan under construction; its budget bounds the number of prompt tokens.
        prefilling: running requests whose prefill is not finished, in order of admission.
        admission: the waiting requests.
        decodes: number of decoding requests.
    """
    builder.images.has_streams = decodes > 0
    for sequence in prefilling:
        if not builder.budget:
            return []
        builder.add_chunk(sequence)
    return admission.admit(builder, decodes + len(prefilling)) if admission.queue else []


def fill_prefill_by_rank(
    builder: PlanBuilder, prefilling: List[SequenceState], admission: PrefillAdmission, decodes: int
) -> list[SequenceState]:
    """Add prefill chunks of running and waiting requests to a plan, in order of priority.

    No request starves: a prefill that was overtaken too often goes first. Takes the same arguments as
    `fill_prefill`, and also returns the newly admitted requests.
    """
    builder.images.has_streams = decodes > 0
    queue, running = admission.queue, decodes + len(prefilling)
    admitted: list[SequenceState] = []
    for sequence in _by_rank(prefilling, admission.admissions):
        head = queue.head()
        if head is not None and head.rank > sequence.rank and not sequence.starved:
            admitted += admission.admit(builder, running + len(admitted), above_rank=sequence.rank)
        if not builder.budget:
            return admitted
        builder.add_chunk(sequence)
    if queue:
        admitted += admission.admit(builder, running + len(admitted))
    return admitted


def prefill_tokens_ahead(head: SequenceState, prefilling: Iterable[SequenceState]) -> int:
    """Return the number of uncomputed tokens of all running prefills that go before the request `head`."""
    ahead = (sequence for sequence in prefilling if sequence.starved or sequence.rank >= head.rank)
    return sum(len(sequence.tokens) - sequence.computed for sequence in ahead)


def _by_rank(prefilling: Iterable[SequenceState], admissions: int) -> list[SequenceState]:
    ordered = list(prefilling)
    for sequence in ordered:
        sequence.starved = sequence.starved or not may_be_overtaken(sequence, admissions)
    ordered.sort(key=lambda sequence: (not sequence.starved, -sequence.rank, sequence.serial))
    return ordered
