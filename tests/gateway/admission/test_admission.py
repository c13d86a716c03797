# SPDX-License-Identifier: Apache-2.0
"""Admission by requests and tokens: fairness between tenants, eviction, reservations and counters."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.gateway.admission.admission import Admission
from mizzen.gateway.admission.queue_entry import QueueEntry, reserve_tokens
from mizzen.gateway.auth.api_keys import Grant
from mizzen.gateway.auth.tenant import Tenant
from mizzen.gateway.errors import ApiError

# ── the queue ─────────────────────────────────────────────────────────────────────────────────────────────


# ── admission ─────────────────────────────────────────────────────────────────────────────────────────────


def tenant(name: str, **limits: Any) -> Tenant:
    return Tenant(Grant(name=name, digest=b"", **limits))


def queue_entry(of: Tenant, tokens: int = 10, seconds: float = 60.0, priority: int = 0) -> QueueEntry:
    return QueueEntry(time.monotonic() + seconds, tenant=of, expected_tokens=tokens, priority=priority)


async def enter_all(
    admission: Admission, entries: list[QueueEntry], order: list[str]
) -> list[asyncio.Task[None]]:
    async def enter(entry: QueueEntry) -> None:
        await admission.enter(entry)
        order.append(entry.tenant.name)
        admission.leave(entry)

    tasks = [asyncio.create_task(enter(mine)) for mine in entries]
    await asyncio.sleep(0)
    return tasks


async def test_admissions_are_shared_between_tenants() -> None:
    capacity = 0
    admission = Admission(lambda: capacity, max_in_flight=1, queue_size=1000)
    flood, second_tenant = tenant("flood"), tenant("other")
    order: list[str] = []
    tasks = await enter_all(admission, [queue_entry(flood) for _ in range(200)], order)
    tasks += await enter_all(admission, [queue_entry(second_tenant) for _ in range(10)], order)
    capacity = 1
    admission.admit_waiting()
    await asyncio.wait_for(asyncio.gather(*tasks), 30)
    assert len(order) == 210
    assert order[:20].count("other") >= 9
    assert admission.in_flight == admission.tokens_in_flight == 0


async def test_higher_priority_gets_more_without_starving_lower_ones() -> None:
    capacity = 0
    admission = Admission(lambda: capacity, max_in_flight=1, queue_size=1000)
    low, high = tenant("low"), tenant("high")
    order: list[str] = []
    tasks = await enter_all(admission, [queue_entry(low) for _ in range(60)], order)
    tasks += await enter_all(admission, [queue_entry(high, priority=3) for _ in range(60)], order)
    capacity = 1
    admission.admit_waiting()
    await asyncio.wait_for(asyncio.gather(*tasks), 30)
    assert 5 <= order[:54].count("low") <= 7


async def test_full_queue_evicts_from_the_tenant_with_the_most_entries() -> None:
    admission = Admission(lambda: 0, max_in_flight=1, queue_size=10)
    flood, second_tenant = tenant("flood"), tenant("other")
    order: list[str] = []
    first = await enter_all(admission, [queue_entry(flood) for _ in range(10)], order)
    more = await enter_all(admission, [queue_entry(flood)], order)
    with pytest.raises(ApiError) as refused:
        await more[0]
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert refused.value.retry_after_seconds
    second = await enter_all(admission, [queue_entry(second_tenant) for _ in range(6)], order)
    await asyncio.sleep(0)
    evicted = [task for task in first if task.done()]
    assert evicted == first[-5:]  # the newest entries of the larger tenant, until both have five
    assert [task.done() for task in second] == [False] * 5 + [True]
    assert len(admission) == 10
    admission.close("the end")
    for task in (*first, *second):
        with pytest.raises(ApiError):
            await task


async def test_tokens_in_flight_are_bounded_and_a_huge_request_runs_alone() -> None:
    admission = Admission(lambda: 100, max_in_flight=100, queue_size=100, max_tokens_in_flight=100)
    the_tenant = tenant("a")
    first, second, huge, last = (
        queue_entry(the_tenant, 60),
        queue_entry(the_tenant, 60),
        queue_entry(the_tenant, 5000),
        queue_entry(the_tenant, 1),
    )
    await admission.enter(first)
    waits = asyncio.create_task(admission.enter(second))
    also = asyncio.create_task(admission.enter(huge))
    behind = asyncio.create_task(admission.enter(last))
    await asyncio.sleep(0.01)
    assert not (waits.done() or also.done() or behind.done())
    admission.leave(first)
    await asyncio.wait_for(waits, 30)
    await asyncio.sleep(0.01)
    assert not (
        also.done() or behind.done()
    )  # admission is in order, so small entries do not overtake the huge one
    admission.leave(second)
    await asyncio.wait_for(also, 30)
    assert admission.tokens_in_flight == 5000
    admission.leave(huge)
    await asyncio.wait_for(behind, 30)
    admission.leave(last)
    assert admission.tokens_in_flight == 0


async def test_tokens_of_all_sequences_are_reserved_together_or_not_at_all() -> None:
    the_tenant = Tenant(Grant(name="a", digest=b"", tokens_per_minute=1000), clock=lambda: 0.0)
    assert the_tenant.tokens is not None
    admission = Admission(lambda: 10, max_in_flight=10, queue_size=10)
    fitting, too_many = (
        [queue_entry(the_tenant, 200) for _ in range(4)],
        [queue_entry(the_tenant, 200) for _ in range(4)],
    )
    await reserve_tokens(fitting)
    with pytest.raises(ApiError) as refused:
        await reserve_tokens(too_many)
    assert (refused.value.status, the_tenant.tokens.level) == (429, 200)
    assert not any(entry.reserved for entry in too_many)
    for entry in fitting[:2]:
        await admission.enter(entry)
    assert the_tenant.tokens.level == 200  # tokens that were reserved together are not charged again
    fitting[0].output_tokens = 700
    admission.leave(fitting[0])
    admission.leave(fitting[1])
    assert the_tenant.tokens.level == -100
    await admission.enter(fitting[2])  # entries of a started request are admitted despite the debt
    admission.leave(fitting[2])
    for _ in range(2):
        admission.settle(fitting[3])
    assert the_tenant.tokens.level == 300
    with pytest.raises(ApiError):
        await admission.enter(queue_entry(the_tenant, 400))


async def test_reserved_tokens_of_an_unadmitted_entry_are_refunded() -> None:
    the_tenant = Tenant(Grant(name="a", digest=b"", tokens_per_minute=1000), clock=lambda: 0.0)
    assert the_tenant.tokens is not None
    unadmitted = queue_entry(the_tenant, 500, seconds=0.0)
    await reserve_tokens([unadmitted])
    admission = Admission(lambda: 0, max_in_flight=10, queue_size=10)
    with pytest.raises(ApiError):
        await admission.enter(unadmitted)
    admission.settle(unadmitted)
    assert the_tenant.tokens.level == 1000


async def test_tokens_are_reserved_at_admission_and_charged_exactly_at_the_end() -> None:
    now = [0.0]
    the_tenant = Tenant(Grant(name="a", digest=b"", tokens_per_minute=1000), clock=lambda: now[0])
    admission = Admission(lambda: 10, max_in_flight=10, queue_size=10)
    assert the_tenant.tokens is not None
    entry = queue_entry(the_tenant, 600)
    await admission.enter(entry)
    assert the_tenant.tokens.level == 400
    with pytest.raises(ApiError) as refused:
        await admission.enter(queue_entry(the_tenant, 600))
    assert (refused.value.status, refused.value.retry_after_seconds) == (429, pytest.approx(12))
    entry.prompt_tokens, entry.output_tokens = 30, 20
    admission.leave(entry)
    assert the_tenant.tokens.level == 950
    sibling = queue_entry(the_tenant, 100)
    sibling.charges_prompt = False
    await admission.enter(sibling)
    sibling.prompt_tokens, sibling.output_tokens = 30, 400
    admission.leave(sibling)
    assert the_tenant.tokens.level == 550
    with pytest.raises(ApiError, match="lower max_tokens") as large:
        await admission.enter(queue_entry(the_tenant, 2000))
    assert large.value.code == "request_too_large"
    rejected = queue_entry(the_tenant, 500, seconds=0.0)
    admission_full = Admission(lambda: 0, max_in_flight=10, queue_size=10)
    with pytest.raises(ApiError):
        await admission_full.enter(rejected)
    assert the_tenant.tokens.level == 550  # an entry that never ran is not charged
    now[0] = 60.0
    assert the_tenant.tokens.level == 1000


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 80), st.booleans()), min_size=1, max_size=40))
def test_admission_counters_return_to_zero(arrivals: list[tuple[int, int, bool]]) -> None:
    async def run() -> None:
        admission = Admission(lambda: 3, max_in_flight=3, queue_size=8, max_tokens_in_flight=120)
        tenants = [tenant(f"t{number}", tokens_per_minute=10**9) for number in range(4)]
        done = Counter[str]()

        async def enter_and_leave(number: int, tokens: int) -> None:
            entry = queue_entry(tenants[number], tokens)
            try:
                await admission.enter(entry)
            except ApiError:
                done["refused"] += 1
                return
            try:
                assert admission.in_flight <= 3
                assert admission.tokens_in_flight <= 120
                await asyncio.sleep(0)
            finally:
                admission.leave(entry)
                done["served"] += 1

        tasks: list[asyncio.Task[None]] = []
        for number, tokens, cancel in arrivals:
            tasks.append(asyncio.create_task(enter_and_leave(number, tokens)))
            await asyncio.sleep(0)
            if cancel:
                tasks[-1].cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert admission.in_flight == admission.tokens_in_flight == len(admission) == 0
        for one_tenant in tenants:
            assert one_tenant.tokens is not None
            assert one_tenant.tokens.level == pytest.approx(10**9)

    asyncio.run(run())


# ── rates ─────────────────────────────────────────────────────────────────────────────────────────────────
