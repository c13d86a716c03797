"""Routing: affinity, load, bounds, ties; and admission as a state machine."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.core.blocks import BLOCK_TOKENS, block_hashes
from mizzen.gateway.admit import Admission, Ticket
from mizzen.gateway.errors import ApiError
from mizzen.gateway.route.plugins import RouteRequest
from mizzen.gateway.route.router import default_router
from mizzen.gateway.route.scorers import EXPECTED_OUTPUT_TOKENS, SMALL_LOAD_TOKENS
from mizzen.gateway.route.sketch import PrefixSketch


@dataclass(eq=False)
class FakeEngine:
    """A candidate with numbers of its own."""

    name: str
    serving: bool = True
    full: bool = False
    load: float = 0.0
    context_length: int = 100_000
    tokenizer_hash: str = "t"
    sketch: PrefixSketch = field(default_factory=PrefixSketch)


def request(tokens: int = 640, seed: int = 0, **fields: Any) -> RouteRequest:
    prompt = np.random.default_rng(seed).integers(0, 1000, tokens).astype(np.int32)
    options = {"tokenizer_hash": "t", "prompt_tokens": tokens, "needed_tokens": tokens + 1, **fields}
    return RouteRequest(**{"blocks": tuple(block_hashes(prompt)), **options})


def test_a_cached_prefix_attracts() -> None:
    engines = [FakeEngine("a"), FakeEngine("b", load=5000), FakeEngine("c")]
    wanted = request()
    engines[1].sketch.add(wanted.blocks)
    route = default_router(125).route(wanted, engines)
    assert route is not None
    assert (route.engine.name, route.reason) == ("b", "prefix")


def test_without_a_prefix_the_least_load_wins() -> None:
    engines = [FakeEngine("a", load=900), FakeEngine("b", load=100), FakeEngine("c", load=500)]
    route = default_router(125).route(request(), engines)
    assert route is not None
    assert (route.engine.name, route.reason) == ("b", "load")


def test_ties_are_broken_at_random() -> None:
    engines = [FakeEngine(name) for name in "abc"]
    router = default_router(125)
    found = Counter(router.route(request(), engines).engine.name for _ in range(300))  # pyright: ignore
    assert set(found) == {"a", "b", "c"}
    assert min(found.values()) > 50


def test_a_hot_prefix_spreads_over_engines() -> None:
    """One prefix alone: no engine gets more than the load factor allows, once loads are not small."""
    engines = [FakeEngine(name) for name in "abcd"]
    router = default_router(125)
    wanted = request(6400)
    cost = 6400 + EXPECTED_OUTPUT_TOKENS
    for _ in range(100):
        route = router.route(wanted, engines)
        assert route is not None
        route.engine.load += cost
        route.engine.sketch.add(wanted.blocks)
        mean = sum(engine.load for engine in engines) / len(engines)
        assert max(engine.load for engine in engines) <= max(SMALL_LOAD_TOKENS, 1.25 * mean) + cost


@pytest.mark.parametrize(
    "left_out", [{"serving": False}, {"full": True}, {"tokenizer_hash": "u"}, {"context_length": 640}]
)
def test_who_cannot_take_a_request_is_left_out(left_out: dict[str, Any]) -> None:
    engines = [FakeEngine("a", **left_out), FakeEngine("b", load=1e9)]
    router = default_router(125)
    route = router.route(request(), engines)
    assert route is not None
    assert (route.engine.name, route.reason) == ("b", "only")
    assert router.route(request(excluded=[engines[1]]), engines) is None


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "remove", "clear"]), st.lists(st.integers(0, 30), max_size=8)),
        max_size=30,
    ),
    probe=st.lists(st.integers(0, 30), max_size=10),
)
def test_the_sketch_is_a_bounded_set_that_forgets_the_oldest(steps: list[Any], probe: list[int]) -> None:
    sketch, model = PrefixSketch(capacity=12), list[int]()
    for kind, names in steps:
        if kind == "add":
            sketch.add(names)
            for name in names:
                model = [other for other in model if other != name] + [name]
            model = model[-12:]
        elif kind == "remove":
            sketch.remove(names)
            model = [name for name in model if name not in names]
        else:
            sketch.clear()
            model = []
        assert len(sketch) == len(model)
    expected = next((i for i, name in enumerate(probe) if name not in model), len(probe))
    assert sketch.match(probe) == expected


def test_blocks_are_named_as_in_the_engine() -> None:
    prompt = np.arange(BLOCK_TOKENS * 2 + 3, dtype=np.int32)
    sketch = PrefixSketch()
    sketch.add(block_hashes(prompt))
    longer = np.concatenate([prompt[: BLOCK_TOKENS * 2], np.full(BLOCK_TOKENS, 7, np.int32)])
    assert sketch.match(tuple(block_hashes(longer))) == 2


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_admission_is_fair_and_loses_no_turn(seed: int) -> None:
    """Random arrivals, ends, aborts, deadlines and changes of capacity: turns in order, counts exact."""
    asyncio.run(admission_run(random.Random(seed)))


async def admission_run(draw: random.Random) -> None:
    room = 2
    admission = Admission(lambda: room, max_in_flight=3, queue_size=6)
    inside: set[int] = set()
    order: list[int] = []
    leave = {number: asyncio.Event() for number in range(30)}

    async def one(number: int) -> str:
        ticket = Ticket(asyncio.get_running_loop().time() + draw.choice([0.003, 5.0, 5.0]))
        try:
            await admission.enter(ticket)
        except ApiError as error:
            return str(error.status)
        order.append(number)
        inside.add(number)
        try:
            await leave[number].wait()
        finally:
            inside.discard(number)
            admission.leave()
        return "done"

    tasks: list[asyncio.Task[str]] = []
    for number in range(30):
        tasks.append(asyncio.create_task(one(number)))
        await asyncio.sleep(0.005 if draw.random() < 0.1 else 0)
        for task_number in list(inside):
            if draw.random() < 0.3:
                leave[task_number].set()
        if draw.random() < 0.1:
            draw.choice(tasks).cancel()
        if draw.random() < 0.3:
            room = draw.choice([0, 1, 2, 5])
            admission.poke()
        await asyncio.sleep(0)
        assert admission.in_flight >= len(inside)
        assert len(admission) <= 6
    room = 100
    for event in leave.values():
        event.set()
    admission.poke()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert {one if isinstance(one, str) else type(one) for one in found} <= {
        "done",
        "429",
        "503",
        asyncio.CancelledError,
    }
    assert admission.in_flight == 0
    assert len(admission) == 0
    assert order == sorted(order), "first come, first served"
