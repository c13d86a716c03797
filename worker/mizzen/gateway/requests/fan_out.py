# SPDX-License-Identifier: Apache-2.0
"""Split an HTTP request into routed requests for engines, and run them concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from starlette.types import Scope

from mizzen.common.tasks import run_together
from mizzen.gateway.admission.queue_entry import QueueEntry, reserve_tokens
from mizzen.gateway.admission.sibling_sequences import SiblingSequences
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.routed_request import RoutedRequest
from mizzen.gateway.routing.dispatcher import Dispatcher
from mizzen.gateway.routing.session import get_session
from mizzen.gateway.telemetry.request_record import get_record

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

SESSION_KEY = "mizzen.session"
"""Key of the session in a request's ASGI scope; all sequences of the request have the same session."""
MAX_CONCURRENT_SEQUENCES = 128
"""Maximum number of sequences of one request that run at a time."""

T = TypeVar("T")
R = TypeVar("R")


def new_routed_request(
    gateway: Gateway,
    scope: Scope,
    generation: GenerationRequest,
    began: float | None = None,
    *,
    first: bool = True,
) -> RoutedRequest:
    """Return the routed request of one sequence.

    Args:
        gateway: The gateway.
        scope: ASGI scope of the HTTP request.
        generation: The sequence's request.
        began: Arrival time of the request (seconds of the monotonic clock); None means now.
        first: True if this is the first sequence of its prompt; only this one is charged for prompt tokens.

    Raises:
        ApiError: 400 or 403 if the tenant may not use the requested priority.
    """
    queue_entry = gateway.new_queue_entry(scope, generation, began, first=first)
    record = get_record(scope)
    record.model, record.stream = generation.model, generation.stream
    if record.keeps_prompt:
        record.keep_prompt(generation.messages or generation.prompt)
    if SESSION_KEY not in scope:
        scope[SESSION_KEY] = get_session(scope["headers"], generation.session)
    return RoutedRequest(
        generation=generation,
        queue_entry=queue_entry,
        priority=queue_entry.priority,
        salt=queue_entry.tenant.grant.salt,
        session=scope[SESSION_KEY],
        record=record,
    )


async def new_routed_requests(
    gateway: Gateway, scope: Scope, generations: Sequence[GenerationRequest]
) -> list[RoutedRequest]:
    """Return a routed request for each prompt of an HTTP request, and reserve the tokens for all prompts.

    Raises:
        ApiError: the tenant may not use the requested priority, or its token budget does not cover all
            prompts; then nothing is reserved.
    """
    routed_requests = [new_routed_request(gateway, scope, generation) for generation in generations]
    entries = [routed.queue_entry for routed in routed_requests]
    link_siblings(gateway, entries)
    await reserve_tokens(entries)
    return routed_requests


def link_siblings(gateway: Gateway, entries: Sequence[QueueEntry]) -> None:
    """Let the queue entries of one request's sequences share a state, if there are several entries."""
    if len(entries) > 1:
        siblings = SiblingSequences(gateway.config.queue_timeout_seconds, gateway.config.queue_size)
        for queue_entry in entries:
            queue_entry.siblings = siblings


def count_placement(gateway: Gateway, routed: RoutedRequest) -> None:
    """Add a sequence's queue time and prompt tokens to its model's metrics, once an engine has begun it."""
    counted = gateway.metrics.for_model(routed.generation.model)
    counted.queue_seconds.observe(routed.queue_entry.waited_seconds)
    counted.prompt_tokens.inc(len(routed.prompt))


async def run_each(
    dispatcher: Dispatcher,
    routed_requests: Sequence[RoutedRequest],
    work: Callable[[RoutedRequest], Awaitable[R]],
) -> list[R]:
    """Run `work` for each routed request, then call the dispatcher's `finish`; return the results in order.

    Raises:
        Exception: the exception of the first call of `work` that failed; the others are cancelled.
    """

    async def run_item(routed: RoutedRequest) -> R:
        try:
            results = await work(routed)
        finally:
            dispatcher.finish(routed)
        # The sequence is short, so it counts as running only for this moment.
        if routed.queue_entry.siblings is not None:
            routed.queue_entry.siblings.sequence_started()
            routed.queue_entry.siblings.sequence_ended()
        return results

    try:
        return await map_concurrently(routed_requests, run_item)
    finally:
        for routed in routed_requests:  # returns the tokens reserved for sequences that have not begun
            dispatcher.finish(routed)


async def map_concurrently(
    items: Sequence[T], work: Callable[[T], Awaitable[R]], concurrency: int = MAX_CONCURRENT_SEQUENCES
) -> list[R]:
    """Return the results of `work` for each item, in order; at most `concurrency` run at a time.

    Raises:
        Exception: the exception of the first call of `work` that failed; the others are cancelled.
    """
    slots = asyncio.Semaphore(concurrency)
    results: dict[int, R] = {}

    async def run_item(index: int, item: T) -> None:
        async with slots:
            results[index] = await work(item)

    await run_together(*(run_item(index, item) for index, item in enumerate(items)))
    return [results[index] for index in range(len(items))]
