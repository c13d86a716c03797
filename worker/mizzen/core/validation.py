# SPDX-License-Identifier: Apache-2.0
"""Validation of new requests: each is rejected with a reason, or becomes a `SequenceState`."""

from __future__ import annotations

from mizzen.core.config import SchedulerConfig
from mizzen.core.images.planner import ImagePlanner
from mizzen.core.policies import RANKED
from mizzen.core.request import Finished, FinishReason, Request
from mizzen.core.sequence import SequenceState
from mizzen.core.side_outputs import has_slot_options, prepare_side_outputs
from mizzen.core.stop_tokens import StopTable


class RequestValidator:
    """Checks new requests against the configuration, and creates their scheduling state."""

    def __init__(self, config: SchedulerConfig, stops: StopTable, images: ImagePlanner) -> None:
        self._images = images
        self._config = config
        self._stops = stops
        self._end_tokens = frozenset(config.end_token_ids)
        self._serial = 0

    def reject(self, request: Request, queue_full: bool) -> Finished | None:
        """Return an error result if a request is invalid or the queue is full, otherwise None."""
        image_fault = self._images.fault(request.images) if request.images else ""
        fault = image_fault or self._fault(request, queue_full)
        if not fault:
            return None
        output = min(max(request.generated, 0), len(request.prompt))
        return Finished(
            rid=request.rid,
            reason=FinishReason.ERROR,
            prompt_tokens=len(request.prompt) - output,
            cached_tokens=0,
            output_tokens=output,
            message=fault,
            refused=bool(image_fault),
        )

    def accept(self, request: Request) -> SequenceState:
        """Create the scheduling state of a valid request, with its length limit and stop tokens."""
        sampling, capacity = request.sampling, self._config.capacity_tokens
        prompt_tokens = len(request.prompt) - request.generated
        limit = min(prompt_tokens + (sampling.max_tokens or capacity), capacity)
        stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops = stops | self._end_tokens if stops else self._end_tokens
        if request.pooling is not None:  # no token is sampled
            limit, stops = len(request.prompt), frozenset()
        self._serial += 1
        sequence = SequenceState(request, self._serial, limit, stops)
        sequence.stop_bits = self._stops.add(stops)
        if self._config.policy in RANKED:
            sequence.rank = request.priority
        if has_slot_options(request):
            prepare_side_outputs(sequence)
        return sequence

    def _fault(self, request: Request, queue_full: bool) -> str:
        length, capacity = len(request.prompt), self._config.capacity_tokens
        if not length:
            return "prompt is empty; it needs at least one token"
        if length >= capacity:
            limit = "context length" if capacity == self._config.context_length else "KV capacity"
            return f"prompt has {length} tokens; the {limit} of {capacity} leaves room for {capacity - 1}"
        if fault := generated_fault(request) or logprobs_fault(request):
            return fault
        if queue_full:
            return f"{self._config.max_waiting_requests} requests are waiting already; try again later"
        return ""


def generated_fault(request: Request) -> str:
    """Return an error message if `request.generated` is invalid, else an empty string."""
    count, most = request.generated, request.sampling.max_tokens
    if not count:
        return ""
    if not 0 <= count < len(request.prompt):
        return f"generated is {count}; of {len(request.prompt)} tokens at least one must be the prompt's"
    if count and request.pooling is not None:
        return f"generated is {count}; an embedding has no output"
    if most is not None and count >= most:
        return f"generated is {count}, max_tokens {most}: the output is complete already"
    return ""


def logprobs_fault(request: Request) -> str:
    """Return an error message if prompt log probabilities cannot be reported, else an empty string."""
    sampling, count = request.sampling, len(request.prompt) - request.generated
    if sampling.prompt_logprobs is not None and request.images:
        return "prompt_logprobs is not supported for prompts with images"
    first = sampling.prompt_logprobs_from
    if sampling.prompt_logprobs is not None and first > count:
        return f"prompt_logprobs_from must be at most {count}, the number of prompt tokens, not {first}"
    return ""
