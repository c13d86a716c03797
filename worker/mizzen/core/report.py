"""What requests are told beside their tokens: from what they ask to what a step found."""

from __future__ import annotations

from mizzen.core.outputs import Reports, RequestLogprobs, RequestVector
from mizzen.core.request import Pooling, Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.sequence import Sequence
from mizzen.core.step_plan import Asks, Side, SlotLogprobs

NO_REPORTS = Reports()
_PLAIN = (0.0, 0.0, 1.0, 0, (), None, None, None)


def asks_anything(request: Request) -> bool:
    """Tell whether a request wants more than temperature and filters; most do not."""
    return request.pooling is not None or _wishes(request.sampling) != _PLAIN


def _wishes(sampling: SamplingParams) -> tuple[object, ...]:
    return (
        sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty,
        sampling.min_tokens, sampling.logit_bias, sampling.logprobs, sampling.prompt_logprobs,
        sampling.grammar,
    )  # fmt: skip


def reads_whole_prompt(request: Request) -> bool:
    """Tell whether a request needs each position of its prompt run, and so none from the prefix cache."""
    if request.pooling is not None:
        return request.pooling is Pooling.MEAN
    return request.sampling.prompt_logprobs is not None and len(request.prompt) - request.generated > 1


def asks_of(sequence: Sequence) -> Asks | None:
    """Return what a request that takes a slot wants there."""
    if not sequence.asks:
        return None
    request = sequence.request
    return Asks(
        tokens=sequence.tokens,
        prompt_tokens=sequence.prompt_tokens,
        end_tokens=tuple(sorted(sequence.stops)),
        prompt_logprobs=request.sampling.prompt_logprobs if sequence.whole else None,
        pooling=request.pooling,
        normalize=request.normalize,
    )


def reports(side: Side | None, holders: list[Sequence | None]) -> Reports:
    """Return what a step found for the requests that still wait for it. `holders` has them by slot."""
    if side is None:
        return NO_REPORTS
    logprobs: list[RequestLogprobs] = []
    vectors: list[RequestVector] = []
    for part in side.logprobs:
        sequence = _waiting(holders, part.slot)
        if sequence is None:
            continue
        found = _fresh(sequence, part) if part.start is not None else part
        if len(found.ids):
            logprobs.append(RequestLogprobs(sequence.rid, found.ids, found.values, part.start is not None))
    for vector in side.vectors:
        sequence = _waiting(holders, vector.slot)
        if sequence is not None:
            vectors.append(
                RequestVector(sequence.rid, vector.vector, sequence.prompt_tokens, sequence.cached_tokens)
            )
    return Reports(tuple(logprobs), tuple(vectors))


def _waiting(holders: list[Sequence | None], slot: int) -> Sequence | None:
    """Return the request that a step ran in a slot; None when it has ended or was retracted since."""
    sequence = holders[slot]
    return sequence if sequence is not None and sequence.slot == slot else None


def _fresh(sequence: Sequence, part: SlotLogprobs) -> SlotLogprobs:
    """Return those of a prompt's tokens that were not reported before the request was retracted."""
    assert part.start is not None
    known = min(1 + sequence.reported - part.start, len(part.ids))
    sequence.reported += len(part.ids) - known
    if sequence.reported == sequence.prompt_tokens - 1:
        sequence.whole = False
    return SlotLogprobs(part.slot, part.ids[known:], part.values[known:], part.start + known)
