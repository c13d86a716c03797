# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of given tokens as the next token of prompts: one prefill for each prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from starlette.types import Scope

from mizzen.gateway.errors import unavailable
from mizzen.gateway.requests.fan_out import count_placement, new_routed_requests, run_each
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.routed_request import RoutedRequest
from mizzen.gateway.routing.dispatcher import Dispatcher
from mizzen.wire.client.stream import EngineRefused, StreamLost

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

LabelLogprobs: TypeAlias = tuple[tuple[float, ...], int]
"""Log probability of each label as the next token, and the number of prompt tokens."""


async def score_labels(
    gateway: Gateway, scope: Scope, generations: list[GenerationRequest]
) -> list[LabelLogprobs]:
    """Return the log probabilities of each prompt's labels, in order.

    Raises:
        ApiError: a prompt is invalid, or no engine could serve it.
    """
    dispatcher = gateway.find_active_service(generations[0].model, scope).dispatcher
    routed_requests = await new_routed_requests(gateway, scope, generations)
    return await run_each(
        dispatcher, routed_requests, lambda routed: score_prompt_labels(gateway, routed, dispatcher)
    )


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
