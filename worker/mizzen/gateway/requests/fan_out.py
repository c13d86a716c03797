"""Work of one HTTP request for engines: jobs, and several of them side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from starlette.types import Scope

from mizzen.common.tasks import together
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
"""Where a request's scope holds its session, which is that of all its sequences."""
MAX_CONCURRENT_SEQUENCES = 128
"""Sequences of one request that are in work at a time."""

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
    """Return the job of one sequence of a request; only the `first` is charged for the prompt.

    Raises:
        ApiError: the tenant may not have it.
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


def new_routed_requests(
    gateway: Gateway, scope: Scope, generations: Sequence[GenerationRequest]
) -> list[RoutedRequest]:
    """Return the jobs of a request with several prompts; the tokens for all of them are reserved.

    Raises:
        ApiError: the tenant may not have them, or lacks the tokens for all of them: then none begins.
    """
    routed_requests = [new_routed_request(gateway, scope, generation) for generation in generations]
    entries = [routed.queue_entry for routed in routed_requests]
    link_siblings(gateway, entries)
    reserve_tokens(entries)
    return routed_requests


def link_siblings(gateway: Gateway, entries: Sequence[QueueEntry]) -> None:
    """Have the sequences of one request wait for one another."""
    if len(entries) > 1:
        siblings = SiblingSequences(gateway.config.queue_timeout_seconds, gateway.config.queue_size)
        for queue_entry in entries:
            queue_entry.siblings = siblings


def count_placement(gateway: Gateway, routed: RoutedRequest) -> None:
    """Count a sequence that an engine has begun, by its model."""
    counted = gateway.metrics.for_model(routed.generation.model)
    counted.queue_seconds.observe(routed.queue_entry.waited_seconds)
    counted.prompt_tokens.inc(len(routed.prompt))


async def run_each(
    dispatcher: Dispatcher,
    routed_requests: Sequence[RoutedRequest],
    work: Callable[[RoutedRequest], Awaitable[R]],
) -> list[R]:
    """Return what the work gives for each job, in their order, and end their time in work.

    Raises:
        Exception: as `each`.
    """

    async def one(routed: RoutedRequest) -> R:
        try:
            found = await work(routed)
        finally:
            dispatcher.finish(routed)
        if routed.queue_entry.siblings is not None:  # each is short: it runs no longer than this moment
            routed.queue_entry.siblings.sequence_started()
            routed.queue_entry.siblings.sequence_ended()
        return found

    try:
        return await map_concurrently(routed_requests, one)
    finally:
        for routed in routed_requests:  # what was reserved for those that have not begun
            dispatcher.finish(routed)


async def map_concurrently(
    items: Sequence[T], work: Callable[[T], Awaitable[R]], at_once: int = MAX_CONCURRENT_SEQUENCES
) -> list[R]:
    """Return what the work gives for each item, in their order; at most `at_once` are in work at a time.

    Raises:
        Exception: what the first failure raised; the others are ended.
    """
    slots = asyncio.Semaphore(at_once)
    found: dict[int, R] = {}

    async def one(index: int, item: T) -> None:
        async with slots:
            found[index] = await work(item)

    await together(*(one(index, item) for index, item in enumerate(items)))
    return [found[index] for index in range(len(items))]
