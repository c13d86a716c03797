"""The work queue: a key once, one worker a key, delays and backoff."""

from __future__ import annotations

import asyncio
import time

import pytest

from mizzen_operator.api.key import ServiceKey
from mizzen_operator.kube.rate_limiter import TokenBucket
from mizzen_operator.manager.fair_queueing import ConcurrencyLimiter
from mizzen_operator.manager.workqueue import FAILURE_HOLD_SECONDS, LOW_PRIORITY_WAIT_SECONDS, WorkQueue

A, B = ServiceKey("n", "a"), ServiceKey("n", "b")


async def empty(queue: WorkQueue) -> bool:
    try:
        key = await asyncio.wait_for(queue.get(), 0.05)
    except TimeoutError:
        return True
    queue.done(key)
    return False


async def test_a_key_waits_once() -> None:
    queue = WorkQueue(ConcurrencyLimiter(8))
    for _ in range(100):
        queue.add(A)
    assert queue.depth() == 1
    assert await queue.get() == A
    queue.done(A)
    assert await empty(queue)


async def test_a_key_that_is_worked_on_waits_until_it_is_done() -> None:
    queue = WorkQueue(ConcurrencyLimiter(8))
    queue.add(A)
    assert await queue.get() == A
    queue.add(A)
    assert await empty(queue)
    queue.done(A)
    assert await queue.get() == A


async def test_a_delayed_key_is_due_later_and_an_earlier_wish_wins() -> None:
    queue = WorkQueue(ConcurrencyLimiter(8))
    queue.add(A, 0.15)
    queue.add(B, 30)
    began = time.monotonic()
    assert await queue.get() == A
    assert 0.1 < time.monotonic() - began < 25
    queue.add(B)
    assert await queue.get() == B
    queue.done(B)
    assert await empty(queue)


async def test_a_later_wish_does_not_put_off() -> None:
    queue = WorkQueue(ConcurrencyLimiter(8))
    queue.add(A, 0.05)
    queue.add(A, 300)
    assert await asyncio.wait_for(queue.get(), 30) == A


async def test_a_waiting_worker_is_woken() -> None:
    queue = WorkQueue(ConcurrencyLimiter(8))
    queue.add(B, 60)
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0.01)
    queue.add(A)
    assert await asyncio.wait_for(waiting, 30) == A


async def test_two_workers_take_two_keys() -> None:
    queue = WorkQueue(ConcurrencyLimiter(8))
    workers = [asyncio.create_task(queue.get()) for _ in range(2)]
    await asyncio.sleep(0)
    queue.add(A)
    queue.add(B)
    assert set(await asyncio.wait_for(asyncio.gather(*workers), 30)) == {A, B}


async def test_retries_back_off_up_to_a_limit_and_begin_anew() -> None:
    queue = WorkQueue(ConcurrencyLimiter(8))
    delays = [queue.requeue_with_backoff(A, 1.0) for _ in range(6)]
    for delay, about in zip(delays, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0], strict=True):
        assert delay == pytest.approx(about, rel=0.11)
    queue.reset_backoff(A)
    assert queue.requeue_with_backoff(A) == pytest.approx(0.1, rel=0.11)


async def test_what_has_failed_is_not_brought_forward_by_what_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, now = WorkQueue(ConcurrencyLimiter(8)), 100.0
    monkeypatch.setattr("mizzen_operator.manager.workqueue.time.monotonic", lambda: now)
    queue.add(A)
    assert await queue.get() == A
    queue.add(A)  # while it is worked on
    assert [queue.requeue_failed(A) for _ in range(9)][-1] > 20
    queue.done(A)
    queue.add(A)
    queue.add(B)
    assert await order(queue) == [B]
    now += FAILURE_HOLD_SECONDS
    assert await order(queue) == [A], "what has happened is seen long before the next retry"
    queue.requeue_failed(A)
    queue.reset_backoff(A)
    queue.add(A)
    assert await order(queue) == [A]


async def test_the_bucket_lets_a_burst_pass_and_then_its_rate() -> None:
    began = time.monotonic()
    slow = TokenBucket(0.01, 10)
    for _ in range(10):
        await slow.acquire()
    assert time.monotonic() - began < 60, "a burst waits for nothing; its rate would take minutes"
    bucket, began = TokenBucket(100, 10), time.monotonic()
    for _ in range(30):
        await bucket.acquire()
    assert time.monotonic() - began > 0.19


async def order(queue: WorkQueue) -> list[ServiceKey]:
    """All keys that are due, as they come."""
    found = []
    while queue.depth():
        found.append(await queue.get())
        queue.done(found[-1])
    return found


async def test_what_is_aside_waits_for_the_others() -> None:
    queue = WorkQueue(ConcurrencyLimiter(8))
    sweep = [ServiceKey("n", str(number)) for number in range(5)]
    for key in sweep:
        queue.add(key, low_priority=True)
    queue.add(A)
    queue.add(sweep[3])  # it has changed
    queue.add(A, low_priority=True)  # and is none of the others for that
    assert await order(queue) == [sweep[3], A, *sweep[:3], sweep[4]]
    assert await empty(queue)


async def test_what_was_put_aside_for_later_and_changes_is_due_at_once() -> None:
    queue = WorkQueue(ConcurrencyLimiter(8))
    queue.add(A, 30, low_priority=True)
    queue.add(B, 0.05, low_priority=True)
    queue.add(A)
    assert await queue.get() == A
    assert await queue.get() == B
    queue.add(A, low_priority=True)
    queue.done(A)
    queue.done(B)
    assert await order(queue) == [A]


async def test_nothing_waits_aside_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, now = WorkQueue(ConcurrencyLimiter(8)), 100.0
    monkeypatch.setattr("mizzen_operator.manager.workqueue.time.monotonic", lambda: now)
    queue.add(A, low_priority=True)
    now += LOW_PRIORITY_WAIT_SECONDS - 1
    queue.add(B)
    assert await queue.get() == B
    queue.done(B)
    queue.add(B)
    now += 1
    assert await order(queue) == [A, B]
