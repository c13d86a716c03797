# SPDX-License-Identifier: Apache-2.0
"""The work queue: a key has at most one entry and one worker at a time; delays, back-off, low priority."""

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


async def test_a_key_is_queued_once() -> None:
    queue = WorkQueue(ConcurrencyLimiter(8))
    for _ in range(100):
        queue.add(A)
    assert queue.depth() == 1
    assert await queue.get() == A
    queue.done(A)
    assert await empty(queue)


async def test_a_key_added_during_its_work_waits_until_that_is_done() -> None:
    queue = WorkQueue(ConcurrencyLimiter(8))
    queue.add(A)
    assert await queue.get() == A
    queue.add(A)
    assert await empty(queue)
    queue.done(A)
    assert await queue.get() == A


async def test_a_delayed_key_is_due_later_unless_it_is_added_again_without_delay() -> None:
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


async def test_adding_a_key_with_a_longer_delay_does_not_delay_it() -> None:
    queue = WorkQueue(ConcurrencyLimiter(8))
    queue.add(A, 0.05)
    queue.add(A, 300)
    assert await asyncio.wait_for(queue.get(), 30) == A


async def test_adding_a_key_wakes_a_waiting_worker() -> None:
    queue = WorkQueue(ConcurrencyLimiter(8))
    queue.add(B, 60)
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0.01)
    queue.add(A)
    assert await asyncio.wait_for(waiting, 30) == A


async def test_two_workers_get_different_keys() -> None:
    queue = WorkQueue(ConcurrencyLimiter(8))
    workers = [asyncio.create_task(queue.get()) for _ in range(2)]
    await asyncio.sleep(0)
    queue.add(A)
    queue.add(B)
    assert set(await asyncio.wait_for(asyncio.gather(*workers), 30)) == {A, B}


async def test_the_back_off_grows_up_to_a_limit_and_can_be_reset() -> None:
    queue = WorkQueue(ConcurrencyLimiter(8))
    delays = [queue.requeue_with_backoff(A, 1.0) for _ in range(6)]
    for delay, about in zip(delays, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0], strict=True):
        assert delay == pytest.approx(about, rel=0.11)
    queue.reset_backoff(A)
    assert queue.requeue_with_backoff(A) == pytest.approx(0.1, rel=0.11)


async def test_events_bring_a_failed_key_forward_only_after_the_hold_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, now = WorkQueue(ConcurrencyLimiter(8)), 100.0
    monkeypatch.setattr("mizzen_operator.manager.workqueue.time.monotonic", lambda: now)
    queue.add(A)
    assert await queue.get() == A
    queue.add(A)  # during the work on it
    assert [queue.requeue_failed(A) for _ in range(9)][-1] > 20
    queue.done(A)
    queue.add(A)
    queue.add(B)
    assert await order(queue) == [B]
    now += FAILURE_HOLD_SECONDS
    assert await order(queue) == [A], "the event is handled long before the next retry"
    queue.requeue_failed(A)
    queue.reset_backoff(A)
    queue.add(A)
    assert await order(queue) == [A]


async def test_the_token_bucket_allows_a_burst_and_then_its_rate() -> None:
    began = time.monotonic()
    slow = TokenBucket(0.01, 10)
    for _ in range(10):
        await slow.acquire()
    assert time.monotonic() - began < 60, "a burst does not wait; at the rate it would take minutes"
    bucket, began = TokenBucket(100, 10), time.monotonic()
    for _ in range(30):
        await bucket.acquire()
    assert time.monotonic() - began > 0.19


async def order(queue: WorkQueue) -> list[ServiceKey]:
    """Return all queued keys in the order in which they are due."""
    keys = []
    while queue.depth():
        keys.append(await queue.get())
        queue.done(keys[-1])
    return keys


async def test_keys_of_low_priority_wait_for_all_others() -> None:
    queue = WorkQueue(ConcurrencyLimiter(8))
    sweep = [ServiceKey("n", str(number)) for number in range(5)]
    for key in sweep:
        queue.add(key, low_priority=True)
    queue.add(A)
    queue.add(sweep[3])  # raises its priority
    queue.add(A, low_priority=True)  # does not lower its priority
    assert await order(queue) == [sweep[3], A, *sweep[:3], sweep[4]]
    assert await empty(queue)


async def test_a_delayed_key_of_low_priority_is_due_at_once_when_it_is_added_normally() -> None:
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


async def test_a_key_of_low_priority_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
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
