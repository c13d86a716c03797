# SPDX-License-Identifier: Apache-2.0
"""Slot options of requests, and the routing of side outputs (log probabilities, embeddings) to requests."""

from __future__ import annotations

import operator

import numpy as np

from mizzen.core.outputs import RequestLogprobs, RequestSideOutputs, RequestVector
from mizzen.core.request import Pooling, Request
from mizzen.core.sampling_params import PARAMETERS
from mizzen.core.sequence import UNLIMITED, SequenceState
from mizzen.core.step_plan import SideOutputs, SlotLogprobs, SlotOptions

NO_SIDE_OUTPUTS = RequestSideOutputs()
_OPTIONS = tuple(parameter for parameter in PARAMETERS if parameter.slot_option)
_option_values = operator.attrgetter(*(parameter.name for parameter in _OPTIONS))
_DEFAULTS = tuple(parameter.default for parameter in _OPTIONS)


def has_slot_options(request: Request) -> bool:
    """Return whether a request needs `SlotOptions`; most requests do not."""
    return request.pooling is not None or _option_values(request.sampling) != _DEFAULTS


def prepare_side_outputs(sequence: SequenceState) -> None:
    """Set up a new request that has `SlotOptions`: which tokens may be cached, and what will be reported.

    The hidden state at a position predicts the token at the next one. So log probabilities from position n on
    need the hidden states from position n - 1 on.
    """
    request = sequence.request
    sequence.has_options = True
    if request.pooling is not None:
        sequence.matchable_tokens = UNLIMITED if request.pooling is Pooling.LAST else 0
        return
    first = max(1, request.sampling.prompt_logprobs_from)
    if request.sampling.prompt_logprobs is not None and first < sequence.prompt_tokens:
        sequence.reported_logprobs = sequence.matchable_tokens = first - 1


def slot_options(sequence: SequenceState) -> SlotOptions | None:
    """Return the `SlotOptions` of a request that starts in a slot, or None if it does not need them."""
    if not sequence.has_options:
        return None
    request, tokens = sequence.request, sequence.tokens
    if request.images:  # the ids of images are no token ids of the model
        tokens = np.concatenate((request.prompt, tokens[len(request.prompt) :]))
    return SlotOptions(
        tokens=tokens,
        prompt_tokens=sequence.prompt_tokens,
        end_tokens=tuple(sorted(sequence.stop_tokens)),
        prompt_logprobs=None if sequence.matchable_tokens == UNLIMITED else request.sampling.prompt_logprobs,
        prompt_logprobs_from=sequence.reported_logprobs + 1,
        pooling=request.pooling,
        normalize=request.normalize and not request.classify,
        classify=request.classify,
        second_start=request.second_start,
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
    complete = sequence.reported_logprobs == sequence.prompt_tokens - 1
    sequence.matchable_tokens = UNLIMITED if complete else sequence.reported_logprobs
    return SlotLogprobs(part.slot, part.ids[known:], part.values[known:], part.start + known)
