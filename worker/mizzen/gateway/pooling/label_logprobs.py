# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of given tokens as the next token of prompts: one prefill for each prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from starlette.types import Scope

from mizzen.core.sampling_params import SamplingParams
from mizzen.gateway.errors import ApiError, unavailable
from mizzen.gateway.requests.fan_out import count_placement, new_routed_requests, run_each
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.routed_request import RoutedRequest
from mizzen.gateway.routing.dispatcher import Dispatcher
from mizzen.wire.client.stream import EngineRefused, StreamLost

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

LABEL_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0)
"""Sampling parameters of requests whose prompts name the labels."""

LabelLogprobs: TypeAlias = tuple[tuple[float, ...], int]
"""Log probability of each label as the next token, and the number of prompt tokens."""


async def score_labels(
    gateway: Gateway, scope: Scope, generations: list[GenerationRequest]
) -> list[LabelLogprobs]:
    """Return the log probabilities of each prompt's labels, in order.

    Raises:
        ApiError: a prompt is invalid, no engine could serve it, or the engine's log probabilities are not
            numbers.
    """
    dispatcher = gateway.find_active_service(generations[0].model, scope).dispatcher
    routed_requests = await new_routed_requests(gateway, scope, generations)
    results = await run_each(
        dispatcher, routed_requests, lambda routed: score_prompt_labels(gateway, routed, dispatcher)
    )
    for generation, (logprobs, _) in zip(generations, results, strict=True):
        check_logprobs(logprobs, generation.prompt_field)
    return results


async def score_prompt_labels(
    gateway: Gateway, routed: RoutedRequest, dispatcher: Dispatcher
) -> LabelLogprobs:
    """Return the log probabilities of one prompt's labels.

    Raises:
        ApiError: the prompt is invalid, or no engine could serve it.
    """
    gateway.restart_queue_timeout(routed.queue_entry)
    attempt = await dispatcher.place(routed)
    count_placement(gateway, routed)
    try:
        tokens, _ = await attempt.next_tokens()
        gateway.metrics.for_model(routed.generation.model).output_tokens.inc(len(tokens))
        routed.record.prompt_tokens += len(routed.prompt)
        routed.record.completion_tokens += len(tokens)
        return attempt.take_logprobs()[0].requested, len(routed.prompt)
    except (StreamLost, EngineRefused) as error:
        raise unavailable(str(error), code="engine_lost") from error
    finally:
        attempt.close()


def check_logprobs(logprobs: Sequence[float], field: str) -> None:
    """Check that log probabilities can be compared.

    Args:
        logprobs: log probability of each label.
        field: field of the body that holds the prompt.

    Raises:
        ApiError: 502 if one of them is not a number, or none is finite.
    """
    if any(map(math.isnan, logprobs)) or not any(map(math.isfinite, logprobs)):
        raise ApiError(502, f"the engine's score of {field} is not a number", code="not_a_number")


def normalize_logprobs(logprobs: Sequence[float]) -> list[float]:
    """Return probabilities that are proportional to those of log probabilities and have a sum of 1."""
    highest = max(logprobs)
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    return [weight / sum(weights) for weight in weights]
