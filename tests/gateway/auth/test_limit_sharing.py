# SPDX-License-Identifier: Apache-2.0
"""Gateway processes share the limits of a key: all together admit what it allows, however requests arrive."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.gateway.auth.api_keys import Grant
from mizzen.gateway.auth.limit_sharing import UNREACHABLE_SECONDS, LimitSharing, Loan, LoanRequest
from mizzen.gateway.auth.tenant import Tenant
from mizzen.gateway.errors import ApiError

LIMIT = 600


@dataclass
class Process:
    """A gateway process with one key, which may hang, or whose answers may get lost."""

    world: World
    name: str
    tenant: Tenant = field(init=False)
    sharing: LimitSharing = field(init=False)
    hangs: bool = False
    loses_answers: bool = False

    def __post_init__(self) -> None:
        self.tenant = Tenant(self.world.grant, self.world.clock)
        self.sharing = LimitSharing(
            lambda: [self.tenant], lambda name: self.tenant if name == "a" else None, self.world.clock
        )
        self.sharing.divide(self.tenant)

    async def ask(self, request: LoanRequest) -> Loan:
        if self.hangs:
            raise OSError("hangs")
        loan = self.sharing.lend(request)
        if self.loses_answers:
            raise OSError("the answer is lost")
        return loan


class World:
    """Gateway processes with a common clock."""

    def __init__(self, count: int, **limits: int) -> None:
        self.grant = Grant(name="a", digest=b"", **limits)
        self.now = 0.0
        self.processes: list[Process] = []
        for _ in range(count):
            self.join()
        self.now += 60  # processes that joined after the first begin with empty buckets

    def clock(self) -> float:
        return self.now

    def join(self) -> Process:
        new = Process(self, f"gateway-{len(self.processes)}/0")
        self.processes.append(new)
        self.observe()
        return new

    def leave(self, process: Process) -> None:
        self.processes.remove(process)
        self.observe()

    def observe(self) -> None:
        """Let every process know which others serve."""
        for process in self.processes:
            others = {other.name: other for other in self.processes if other is not process}
            process.sharing.set_members(process.name, others, joins=bool(others))

    async def admit(self, process: Process, tokens: int = 0) -> bool:
        try:
            await process.tenant.begin_request()
            process.tenant.end_request()
            await process.tenant.reserve(tokens)
        except ApiError as error:
            assert error.status == 429
            return False
        return True

    async def load(self, weights: list[float], seconds: float, *, rate: float, tokens: int = 0) -> int:
        """Send requests at `rate` per second, spread by `weights`; return the number of admitted ones."""
        admitted, draw = 0, random.Random(7)
        for _ in range(int(seconds * rate)):
            self.now += 1 / rate
            process = draw.choices(self.processes, weights)[0]
            admitted += await self.admit(process, tokens)
        return admitted


@pytest.mark.parametrize("weights", [[1, 0, 0], [8, 1, 1], [1, 1, 1]])
async def test_a_key_gets_its_limit_however_its_requests_are_spread(weights: list[float]) -> None:
    world = World(3, requests_per_minute=LIMIT)
    first = await world.load(weights, 60, rate=30)
    assert first <= 2 * LIMIT  # a bucket holds a minute's amount and refills meanwhile
    later = await world.load(weights, 60, rate=30)
    assert 0.9 * LIMIT <= later <= 1.1 * LIMIT


async def test_a_burst_to_one_process_gets_the_whole_limit_and_no_more() -> None:
    world = World(4, requests_per_minute=60)
    admitted = [await world.admit(world.processes[1]) for _ in range(100)]
    assert sum(admitted) == 60
    admitted = [await world.admit(process) for process in world.processes for _ in range(9)]
    assert not any(admitted)


async def test_concurrent_requests_of_a_burst_get_the_whole_limit() -> None:
    world = World(3, requests_per_minute=90)
    admitted = await asyncio.gather(*(world.admit(world.processes[0]) for _ in range(120)))
    assert sum(admitted) == 90


@pytest.mark.parametrize("weights", [[1, 0, 0], [3, 1, 0]])
async def test_tokens_per_minute_are_shared_too(weights: list[float]) -> None:
    world = World(3, tokens_per_minute=60_000)
    await world.load(weights, 60, rate=20, tokens=100)
    later = await world.load(weights, 60, rate=20, tokens=100)
    assert 0.9 * 600 <= later <= 1.1 * 600


async def test_a_request_for_most_of_a_minutes_tokens_collects_them_from_all_processes() -> None:
    world = World(3, tokens_per_minute=3000)
    assert await world.admit(world.processes[0], 2900)
    assert not await world.admit(world.processes[1], 200)
    world.processes[0].tenant.settle(2900, 400)
    world.now += 1  # a process that got nothing does not ask again at once
    assert await world.admit(world.processes[1], 2500)
    assert not await world.admit(world.processes[2], 200)


@settings(max_examples=25, deadline=None)
@given(
    weights=st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(lambda weights: sum(weights) > 0.1),
    hanging=st.sets(st.integers(0, 2), max_size=2),
    limit=st.integers(1, 50),
)
def test_processes_never_exceed_a_limit_even_if_some_are_unreachable(
    weights: list[float], hanging: set[int], limit: int
) -> None:
    world = World(3, requests_per_minute=limit)
    for index in hanging:
        world.processes[index].hangs = True
    admitted = asyncio.run(world.load(weights, 120, rate=3))
    assert admitted <= 3 * limit + 1


async def test_the_limit_holds_while_a_failed_process_is_still_listed_and_when_it_is_not() -> None:
    world = World(2, requests_per_minute=LIMIT)
    survivor, failed = world.processes
    await world.load([1, 1], 60, rate=30)
    failed.hangs = True
    listed = await world.load([1, 0], 60, rate=30)
    assert 0.45 * LIMIT <= listed <= LIMIT
    world.leave(failed)
    alone = await world.load([1], 60, rate=30)
    assert 0.9 * LIMIT <= alone <= 1.1 * LIMIT
    replacement = world.join()
    assert replacement.tenant.requests is not None and replacement.tenant.requests.level < 1
    both = await world.load([1, 1], 60, rate=30)
    assert 0.9 * LIMIT <= both <= 1.1 * LIMIT
    assert survivor.tenant.requests is not None


async def test_concurrent_requests_are_limited_over_all_processes() -> None:
    world = World(3, max_parallel=5)
    one, two, _ = (process.tenant for process in world.processes)
    for _ in range(5):
        await one.begin_request()
    with pytest.raises(ApiError, match="5 requests in progress"):
        await one.begin_request()
    with pytest.raises(ApiError, match="5 requests in progress"):
        await two.begin_request()
    one.end_request()
    world.now += 1
    await two.begin_request()
    for tenant, running in ((one, 4), (two, 1)):
        for _ in range(running):
            tenant.end_request()
    for process in world.processes:
        await process.sharing.give_back()
    available = [process.tenant.slots.available for process in world.processes if process.tenant.slots]
    assert available == [2, 2, 1]


async def test_a_lost_answer_does_not_lose_slots() -> None:
    world = World(2, max_parallel=2)
    one, two = world.processes
    await one.tenant.begin_request()
    two.loses_answers = True
    with pytest.raises(ApiError):
        await one.tenant.begin_request()
    assert two.tenant.slots is not None and two.tenant.slots.available == 0
    two.loses_answers = False
    world.now += UNREACHABLE_SECONDS
    await one.sharing.give_back()
    assert two.tenant.slots.available == 1


async def test_slots_of_a_failed_process_return() -> None:
    world = World(2, max_parallel=4)
    one, two = world.processes
    for _ in range(4):
        await two.tenant.begin_request()
    assert one.tenant.slots is not None and one.tenant.slots.available == 0
    world.leave(two)
    assert one.tenant.slots.available == 4


async def test_headers_report_the_limit_of_all_processes() -> None:
    world = World(4, requests_per_minute=100)
    tenant = world.processes[0].tenant
    await tenant.begin_request()
    headers = dict(tenant.rate_limit_headers())
    assert headers[b"x-ratelimit-limit-requests"] == b"100"
    assert headers[b"x-ratelimit-remaining-requests"] == b"99"
    for _ in range(98):
        await tenant.begin_request()
    assert dict(tenant.rate_limit_headers())[b"x-ratelimit-remaining-requests"] == b"1"
