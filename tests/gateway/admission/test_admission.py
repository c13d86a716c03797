"""Whose turn it is: fair queueing, admission by requests and tokens, rates."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.gateway.admission.admission import Admission
from mizzen.gateway.admission.fair_queue import FairQueue
from mizzen.gateway.admission.queue_entry import QueueEntry, reserve_tokens
from mizzen.gateway.auth.api_keys import Grant
from mizzen.gateway.auth.rate_limits import TokenBucket
from mizzen.gateway.auth.tenant import Tenant
from mizzen.gateway.errors import ApiError
from mizzen.gateway.text.model import MAX_CONCURRENT_HUGE, HUGE_CHARACTERS, build_text_model
from mizzen.gateway.text.tokenizer import Tokenizer

# ── the queue ─────────────────────────────────────────────────────────────────────────────────────────────

FLOWS = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 2.0, 4.0]), st.lists(st.integers(1, 1000), min_size=1, max_size=12)),
    min_size=1,
    max_size=6,
)


@given(FLOWS)
def test_while_two_flows_wait_what_they_get_differs_by_no_more_than_an_item_of_each(
    flows: list[tuple[float, list[int]]],
) -> None:
    """The bound of Goyal, Vin and Cheng: |W1/w1 - W2/w2| <= c1/w1 + c2/w2, whatever the others send."""
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for flow, (weight, costs) in enumerate(flows):
        for number, cost in enumerate(costs):
            queue.push((flow, number), flow, 0, cost, weight)
    given_to = [0.0] * len(flows)
    waiting = [len(costs) for _, costs in flows]
    largest = [max(costs) / weight for weight, costs in flows]
    while queue:
        flow, number = queue.pop()
        weight, costs = flows[flow]
        given_to[flow] += costs[number] / weight
        waiting[flow] -= 1
        backlogged = [one for one, left in enumerate(waiting) if left]
        for one in backlogged:
            for other in backlogged:
                assert abs(given_to[one] - given_to[other]) <= largest[one] + largest[other] + 1e-6


@given(st.integers(1, 300), st.integers(1, 1000), st.integers(1, 1000))
def test_a_flood_does_not_starve_another(flood: int, large: int, small: int) -> None:
    """One that comes after a flood waits for no more than one item of it, whatever the items cost."""
    queue: FairQueue[int] = FairQueue()
    for number in range(flood):
        queue.push(number, "a", 0, large, 1.0)
    for _ in range(min(flood - 1, 5)):
        queue.pop()
    queue.push(-1, "b", 0, small, 1.0)
    order = [queue.pop() for _ in range(len(queue))]
    assert order.index(-1) <= 1


@pytest.mark.parametrize("keep", [0, 1])
def test_who_comes_and_goes_takes_no_memory(keep: int) -> None:
    """Requests that time out or are cancelled while nothing is taken, of flows that empty or do not."""
    queue: FairQueue[int] = FairQueue()
    queue.push(-1, "a", 0, 10, 1.0)
    for number in range(keep):
        queue.push(-2 - number, "b", 0, 10, 1.0)
    for number in range(1000):
        queue.push(number, "b", 0, 10, 1.0)
        queue.remove(number - keep if number >= keep else -2)
    assert len(queue._heads) <= 2
    assert queue.pop() == -1
    assert len(queue) == keep


class QueueModel:
    """What a fair queue must keep, whatever is done with it."""

    def __init__(self) -> None:
        self.queue: FairQueue[int] = FairQueue()
        self.flows: dict[tuple[int, int], deque[int]] = {}
        self.front: deque[int] = deque()
        self.taken: list[int] = []
        self.count = 0

    def push(self, group: int, kind: int, cost: int) -> None:
        self.queue.push(self.count, group, kind, cost, 2.0**kind)
        self.flows.setdefault((group, kind), deque()).append(self.count)
        self.count += 1

    def pop(self) -> None:
        waiting = [flow for flow in self.flows.values() if flow]
        if not waiting and not self.front:
            assert self.queue.peek() is None
            with pytest.raises(IndexError):
                self.queue.pop()
            return
        expected = self.queue.peek()  # work conserving: there is one
        item = self.queue.pop()
        assert item == expected
        if self.front:
            assert item == self.front.popleft()
        else:
            [flow] = [flow for flow in waiting if flow[0] == item]  # in order within its flow
            flow.popleft()
        self.taken.append(item)

    def remove(self, item: int) -> None:
        flow = next((flow for flow in self.flows.values() if item in flow), None)
        assert self.queue.remove(item) == (flow is not None or item in self.front)
        if flow is not None:
            flow.remove(item)
        elif item in self.front:
            self.front.remove(item)

    def back(self) -> None:
        if self.taken:
            item = self.taken.pop()
            self.queue.push_front(item)
            self.front.appendleft(item)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 3), st.integers(-1, 1), st.integers(1, 500)),
        st.tuples(st.just("pop")),
        st.tuples(st.just("remove"), st.integers(0, 60)),
        st.tuples(st.just("back")),
        st.tuples(st.just("correct"), st.integers(0, 3), st.integers(-1, 1), st.integers(-500, 5000)),
    ),
    max_size=80,
)


@given(STEPS)
def test_the_queue_is_in_order_within_a_flow_loses_nothing_and_is_work_conserving(
    steps: list[tuple[Any, ...]],
) -> None:
    model = QueueModel()
    for name, *arguments in steps:
        if name == "correct":
            model.queue.charge(*arguments)
        else:
            getattr(model, name)(*arguments)
        left = sum(map(len, model.flows.values())) + len(model.front)
        assert len(model.queue) == len(list(model.queue)) == left
    while model.queue:
        model.pop()
    assert not any(model.flows.values())


def test_each_step_of_weight_doubles_the_share() -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number in range(1000):
        queue.push(("low", number), "a", 0, 10, 1.0)
        queue.push(("high", number), "b", 1, 10, 2.0)
    got = Counter(queue.pop()[0] for _ in range(900))
    assert abs(got["high"] - 600) <= 2


def test_a_flow_pays_for_what_its_items_really_cost() -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number in range(20):
        queue.push(("a", number), "a", 0, 10, 1.0)
        queue.push(("b", number), "b", 0, 10, 1.0)
    assert queue.pop() == ("a", 0)
    queue.charge("a", 0, 50)
    got = Counter(queue.pop()[0] for _ in range(15))
    assert got["b"] >= got["a"] + 4


# ── admission ─────────────────────────────────────────────────────────────────────────────────────────────


def tenant(name: str, **limits: Any) -> Tenant:
    return Tenant(Grant(name=name, digest=b"", **limits))


def queue_entry(of: Tenant, tokens: int = 10, seconds: float = 60.0, priority: int = 0) -> QueueEntry:
    return QueueEntry(time.monotonic() + seconds, tenant=of, expected_tokens=tokens, priority=priority)


async def enter_all(
    admission: Admission, entries: list[QueueEntry], order: list[str]
) -> list[asyncio.Task[None]]:
    async def one(mine: QueueEntry) -> None:
        await admission.enter(mine)
        order.append(mine.tenant.name)
        admission.leave(mine)

    tasks = [asyncio.create_task(one(mine)) for mine in entries]
    await asyncio.sleep(0)
    return tasks


async def test_turns_are_shared_between_keys() -> None:
    room = 0
    admission = Admission(lambda: room, max_in_flight=1, queue_size=1000)
    flood, other = tenant("flood"), tenant("other")
    order: list[str] = []
    tasks = await enter_all(admission, [queue_entry(flood) for _ in range(200)], order)
    tasks += await enter_all(admission, [queue_entry(other) for _ in range(10)], order)
    room = 1
    admission.admit_waiting()
    await asyncio.wait_for(asyncio.gather(*tasks), 30)
    assert len(order) == 210
    assert order[:20].count("other") >= 9
    assert admission.in_flight == admission.tokens_in_flight == 0


async def test_a_higher_priority_has_twice_the_share_and_starves_nobody() -> None:
    room = 0
    admission = Admission(lambda: room, max_in_flight=1, queue_size=1000)
    low, high = tenant("low"), tenant("high")
    order: list[str] = []
    tasks = await enter_all(admission, [queue_entry(low) for _ in range(60)], order)
    tasks += await enter_all(admission, [queue_entry(high, priority=3) for _ in range(60)], order)
    room = 1
    admission.admit_waiting()
    await asyncio.wait_for(asyncio.gather(*tasks), 30)
    assert 5 <= order[:54].count("low") <= 7


async def test_a_full_queue_takes_from_whoever_has_most() -> None:
    admission = Admission(lambda: 0, max_in_flight=1, queue_size=10)
    flood, other = tenant("flood"), tenant("other")
    order: list[str] = []
    first = await enter_all(admission, [queue_entry(flood) for _ in range(10)], order)
    more = await enter_all(admission, [queue_entry(flood)], order)
    with pytest.raises(ApiError) as refused:
        await more[0]
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert refused.value.retry_after_seconds
    second = await enter_all(admission, [queue_entry(other) for _ in range(6)], order)
    await asyncio.sleep(0)
    lost = [task for task in first if task.done()]
    assert lost == first[-5:]  # the newest of the flood, until both have as many
    assert [task.done() for task in second] == [False] * 5 + [True]
    assert len(admission) == 10
    admission.close("the end")
    for task in (*first, *second):
        with pytest.raises(ApiError):
            await task


async def test_tokens_in_flight_are_bounded_and_a_huge_request_goes_alone() -> None:
    admission = Admission(lambda: 100, max_in_flight=100, queue_size=100, max_tokens_in_flight=100)
    some = tenant("a")
    one, two, huge, last = (
        queue_entry(some, 60),
        queue_entry(some, 60),
        queue_entry(some, 5000),
        queue_entry(some, 1),
    )
    await admission.enter(one)
    waits = asyncio.create_task(admission.enter(two))
    also = asyncio.create_task(admission.enter(huge))
    behind = asyncio.create_task(admission.enter(last))
    await asyncio.sleep(0.01)
    assert not (waits.done() or also.done() or behind.done())
    admission.leave(one)
    await asyncio.wait_for(waits, 30)
    await asyncio.sleep(0.01)
    assert not (also.done() or behind.done())  # in order: what is small does not overtake for ever
    admission.leave(two)
    await asyncio.wait_for(also, 30)
    assert admission.tokens_in_flight == 5000
    admission.leave(huge)
    await asyncio.wait_for(behind, 30)
    admission.leave(last)
    assert admission.tokens_in_flight == 0


async def test_all_tickets_of_a_request_are_reserved_at_once_or_none() -> None:
    some = Tenant(Grant(name="a", digest=b"", tokens_per_minute=1000), clock=lambda: 0.0)
    assert some.tokens is not None
    admission = Admission(lambda: 10, max_in_flight=10, queue_size=10)
    mine, others = [queue_entry(some, 200) for _ in range(4)], [queue_entry(some, 200) for _ in range(4)]
    reserve_tokens(mine)
    with pytest.raises(ApiError) as refused:
        reserve_tokens(others)
    assert (refused.value.status, some.tokens.level) == (429, 200)
    assert not any(one.reserved for one in others)
    for one in mine[:2]:
        await admission.enter(one)
    assert some.tokens.level == 200  # and nothing twice
    mine[0].output_tokens = 700
    admission.leave(mine[0])
    admission.leave(mine[1])
    assert some.tokens.level == -100
    await admission.enter(mine[2])  # a debt is the next request's
    admission.leave(mine[2])
    for _ in range(2):
        admission.settle(mine[3])
    assert some.tokens.level == 300
    with pytest.raises(ApiError):
        await admission.enter(queue_entry(some, 400))


async def test_a_reserved_ticket_that_gets_no_turn_costs_nothing() -> None:
    some = Tenant(Grant(name="a", digest=b"", tokens_per_minute=1000), clock=lambda: 0.0)
    assert some.tokens is not None
    never = queue_entry(some, 500, seconds=0.0)
    reserve_tokens([never])
    admission = Admission(lambda: 0, max_in_flight=10, queue_size=10)
    with pytest.raises(ApiError):
        await admission.enter(never)
    admission.settle(never)
    assert some.tokens.level == 1000


async def test_what_no_context_holds_keeps_nobody_waiting(live: Any, scripted: Any, until: Any) -> None:
    """A huge max_tokens is refused at once, not when everything else has ended."""
    engine = scripted(context_length=4096)
    engine.does.fault, engine.does.fault_after = "mute", 1
    gateway = await live(engine, max_tokens_in_flight=16_384)
    async with httpx.AsyncClient(timeout=60) as http:
        url = f"{gateway.url}/v1/completions"
        body = {"model": "demo", "prompt": "a", "max_tokens": 100}
        first = asyncio.create_task(http.post(url, json=body))
        await until(lambda: gateway.gateway.in_flight == 1)
        answer = await http.post(url, json={**body, "max_tokens": 10**9})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert not first.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize("kind", ["chat/completions", "completions", "embeddings"])
async def test_a_prompt_that_no_context_holds_is_not_even_tokenized(
    live: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A token takes some hundred bytes while it is made: a few such prompts would fill the memory."""
    gateway, encode = await live(scripted(context_length=2048)), Tokenizer.encode

    def encoded(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        assert len(text) < 100_000
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", encoded)
    text = "hello " * 500_000
    given = {
        "chat/completions": {"messages": [{"role": "user", "content": text}]},
        "completions": {"prompt": ["a", text]},
        "embeddings": {"input": text},
    }
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{gateway.url}/v1/{kind}", json={"model": "demo", **given[kind]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
    assert "the context length is 2048 tokens, but the prompt has at least " in error["message"]
    assert error["param"] == next(iter(given[kind]))


async def test_huge_texts_are_tokenized_by_two_at_a_time(
    tokenizer_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def encoded(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encoded)
    text = build_text_model("demo", tokenizer_files)
    await asyncio.gather(*(text.text_prompt("a" * (HUGE_CHARACTERS + 1)) for _ in range(8)))
    assert most == MAX_CONCURRENT_HUGE
    await asyncio.gather(*(text.text_prompt("a" * HUGE_CHARACTERS) for _ in range(8)))
    assert most > MAX_CONCURRENT_HUGE


async def test_tokens_are_reserved_at_the_start_and_charged_exactly_at_the_end() -> None:
    now = [0.0]
    some = Tenant(Grant(name="a", digest=b"", tokens_per_minute=1000), clock=lambda: now[0])
    admission = Admission(lambda: 10, max_in_flight=10, queue_size=10)
    assert some.tokens is not None
    one = queue_entry(some, 600)
    await admission.enter(one)
    assert some.tokens.level == 400
    with pytest.raises(ApiError) as refused:
        await admission.enter(queue_entry(some, 600))
    assert (refused.value.status, refused.value.retry_after_seconds) == (429, pytest.approx(12))
    one.prompt_tokens, one.output_tokens = 30, 20
    admission.leave(one)
    assert some.tokens.level == 950
    sibling = queue_entry(some, 100)
    sibling.charges_prompt = False
    await admission.enter(sibling)
    sibling.prompt_tokens, sibling.output_tokens = 30, 400
    admission.leave(sibling)
    assert some.tokens.level == 550
    with pytest.raises(ApiError, match="ask for less") as large:
        await admission.enter(queue_entry(some, 2000))
    assert large.value.code == "request_too_large"
    never = queue_entry(some, 500, seconds=0.0)
    admission_full = Admission(lambda: 0, max_in_flight=10, queue_size=10)
    with pytest.raises(ApiError):
        await admission_full.enter(never)
    assert some.tokens.level == 550  # what never ran costs nothing
    now[0] = 60.0
    assert some.tokens.level == 1000


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 80), st.booleans()), min_size=1, max_size=40))
def test_admission_counts_come_out_even(arrivals: list[tuple[int, int, bool]]) -> None:
    async def run() -> None:
        admission = Admission(lambda: 3, max_in_flight=3, queue_size=8, max_tokens_in_flight=120)
        tenants = [tenant(f"t{number}", tokens_per_minute=10**9) for number in range(4)]
        done = Counter[str]()

        async def one(number: int, tokens: int) -> None:
            mine = queue_entry(tenants[number], tokens)
            try:
                await admission.enter(mine)
            except ApiError:
                done["refused"] += 1
                return
            try:
                assert admission.in_flight <= 3
                assert admission.tokens_in_flight <= 120
                await asyncio.sleep(0)
            finally:
                admission.leave(mine)
                done["served"] += 1

        tasks: list[asyncio.Task[None]] = []
        for number, tokens, cancel in arrivals:
            tasks.append(asyncio.create_task(one(number, tokens)))
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


@given(st.integers(1, 10**6), st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 10**6)), max_size=50))
def test_a_bucket_never_gives_more_than_its_rate_and_a_minutes_worth(
    rate: int, takes: list[tuple[float, float]]
) -> None:
    now, given_out = 0.0, 0.0
    bucket = TokenBucket(rate, lambda: now)
    for pause, amount in takes:
        now += pause
        wait = bucket.take(amount)
        if wait:
            now += wait if amount <= rate else 0.0
            if amount <= rate * (1 - 1e-9):
                now += 1e-6
                assert bucket.take(amount) == pytest.approx(0.0, abs=1e-3)
                given_out += amount
        else:
            given_out += amount
        assert given_out <= rate + now * rate / 60 + 1e-3 * rate


def test_a_debt_is_paid_before_anything_is_given() -> None:
    now = [0.0]
    bucket = TokenBucket(60, lambda: now[0])
    assert bucket.take(60) == 0.0
    bucket.refund(-30)
    assert bucket.level == -30
    assert bucket.take(1) == pytest.approx(31)
    now[0] = 31.0
    assert bucket.take(1) == 0.0
    bucket.set_rate(120)  # what was used stays used
    assert bucket.level == pytest.approx(60)
