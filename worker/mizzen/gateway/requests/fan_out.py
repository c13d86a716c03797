"""Work of one HTTP request for engines: jobs, and several of them side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from starlette.types import Scope

from mizzen.common.tasks import together
from mizzen.gateway.admission.admission import Ticket, reserve
from mizzen.gateway.admission.sibling_sequences import Siblings
from mizzen.gateway.requests.generation_request import Wish
from mizzen.gateway.routing.dispatcher import Dispatcher, Job
from mizzen.gateway.routing.session import session_of
from mizzen.gateway.telemetry.request_record import record_of

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

SESSION = "mizzen.session"
"""Where a request's scope holds its session, which is that of all its sequences."""
AT_ONCE = 128
"""Sequences of one request that are in work at a time."""

T = TypeVar("T")
R = TypeVar("R")


def new_job(
    gateway: Gateway, scope: Scope, wish: Wish, began: float | None = None, *, first: bool = True
) -> Job:
    """Return the job of one sequence of a request; only the `first` is charged for the prompt.

    Raises:
        ApiError: the tenant may not have it.
    """
    ticket = gateway.ticket(scope, wish, began, first=first)
    record = record_of(scope)
    record.model, record.stream = wish.model, wish.stream
    if record.keeps_prompt:
        record.keep(wish.messages or wish.prompt)
    if SESSION not in scope:
        scope[SESSION] = session_of(scope["headers"], wish.session)
    return Job(
        wish=wish,
        ticket=ticket,
        priority=ticket.priority,
        salt=ticket.tenant.grant.salt,
        session=scope[SESSION],
        record=record,
    )


def new_jobs(gateway: Gateway, scope: Scope, wishes: Sequence[Wish]) -> list[Job]:
    """Return the jobs of a request with several prompts; the tokens for all of them are reserved.

    Raises:
        ApiError: the tenant may not have them, or lacks the tokens for all of them: then none begins.
    """
    jobs = [new_job(gateway, scope, wish) for wish in wishes]
    tickets = [job.ticket for job in jobs]
    relate(gateway, tickets)
    reserve(tickets)
    return jobs


def relate(gateway: Gateway, tickets: Sequence[Ticket]) -> None:
    """Have the sequences of one request wait for one another."""
    if len(tickets) > 1:
        siblings = Siblings(gateway.config.queue_timeout_seconds, gateway.config.queue_size)
        for ticket in tickets:
            ticket.siblings = siblings


def count_placed(gateway: Gateway, job: Job) -> None:
    """Count a sequence that an engine has begun, by its model."""
    counted = gateway.metrics.of(job.wish.model)
    counted.queue_seconds.observe(job.ticket.waited)
    counted.prompt_tokens.inc(len(job.prompt))


async def each_job(
    dispatcher: Dispatcher, jobs: Sequence[Job], work: Callable[[Job], Awaitable[R]]
) -> list[R]:
    """Return what the work gives for each job, in their order, and end their time in work.

    Raises:
        Exception: as `each`.
    """

    async def one(job: Job) -> R:
        try:
            found = await work(job)
        finally:
            dispatcher.leave(job)
        if job.ticket.siblings is not None:  # each is short: it runs no longer than this moment
            job.ticket.siblings.began()
            job.ticket.siblings.ended()
        return found

    try:
        return await each(jobs, one)
    finally:
        for job in jobs:  # what was reserved for those that have not begun
            dispatcher.leave(job)


async def each(items: Sequence[T], work: Callable[[T], Awaitable[R]], at_once: int = AT_ONCE) -> list[R]:
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
