# SPDX-License-Identifier: Apache-2.0
"""Slot options of requests, and the routing of side outputs (log probabilities, embeddings) to requests."""

from __future__ import annotations

import operator

from mizzen.core.outputs import RequestLogprobs, RequestSideOutputs, RequestVector
from mizzen.core.request import Pooling, Request
from mizzen.core.sampling_params import PARAMETERS
from mizzen.core.sequence import SequenceState
from mizzen.core.step_plan import SideOutputs, SlotLogprobs, SlotOptions

NO_SIDE_OUTPUTS = RequestSideOutputs()
_OPTIONS = tuple(parameter for parameter in PARAMETERS if parameter.slot_option)
_option_values = operator.attrgetter(*(parameter.name for parameter in _OPTIONS))
_DEFAULTS = tuple(parameter.default for parameter in _OPTIONS)


def has_slot_options(request: Request) -> bool:
    """Return whether a request needs `SlotOptions`; most requests do not."""
    return request.pooling is not None or _option_values(request.sampling) != _DEFAULTS


def needs_full_prefill(request: Request) -> bool:
    """Return whether every prompt position of a request must be computed, without the prefix cache."""
    if request.pooling is not None:
        return request.pooling is Pooling.MEAN
    return request.sampling.prompt_logprobs is not None and len(request.prompt) - request.generated > 1


def slot_options(sequence: SequenceState) -> SlotOptions | None:
    """Return the `SlotOptions` of a request that starts in a slot, or None if it does not need them."""
    if not sequence.has_options:
        return None
    request = sequence.request
    return SlotOptions(
        tokens=sequence.tokens,
        prompt_tokens=sequence.prompt_tokens,
        end_tokens=tuple(sorted(sequence.stop_tokens)),
        prompt_logprobs=request.sampling.prompt_logprobs if sequence.full_prefill else None,
        pooling=request.pooling,
        normalize=request.normalize,
    )


def route_side_outputs(
    side: SideOutputs | None, slot_owners: list[SequenceState | None]
) -> RequestSideOutputs:
    """Return the side outputs of a step by request instead of by slot.

    Outputs of requests that have left their slot since the launch, and prompt log probabilities that were
    already reported, are dropped.

    Args:
        side: side outputs by slot; None if the step has none.
        slot_owners: request in each slot.
    """
    if side is None:
        return NO_SIDE_OUTPUTS
    logprobs: list[RequestLogprobs] = []
    vectors: list[RequestVector] = []
    for part in side.logprobs:
        sequence = _owner_of(slot_owners, part.slot)
        if sequence is None:
            continue
        reported = _unreported(sequence, part) if part.start is not None else part
        if len(reported.ids):
            logprobs.append(
                RequestLogprobs(sequence.rid, reported.ids, reported.values, part.start is not None)
            )
    for vector in side.vectors:
        sequence = _owner_of(slot_owners, vector.slot)
        if sequence is not None:
            vectors.append(
                RequestVector(sequence.rid, vector.vector, sequence.prompt_tokens, sequence.cached_tokens)
            )
    return RequestSideOutputs(tuple(logprobs), tuple(vectors))


def _owner_of(slot_owners: list[SequenceState | None], slot: int) -> SequenceState | None:
    """Return the request that a step ran in a slot, or None if the request has left the slot since."""
    sequence = slot_owners[slot]
    return sequence if sequence is not None and sequence.slot == slot else None


def _unreported(sequence: SequenceState, part: SlotLogprobs) -> SlotLogprobs:
    """Return the entries of `part` that were not reported before a retraction, and count them as reported.

    `part` holds log probabilities of consecutive prompt tokens.
    """
    assert part.start is not None
    known = min(1 + sequence.reported_logprobs - part.start, len(part.ids))
    sequence.reported_logprobs += len(part.ids) - known
    if sequence.reported_logprobs == sequence.prompt_tokens - 1:
        sequence.full_prefill = False
    return SlotLogprobs(part.slot, part.ids[known:], part.values[known:], part.start + known)
