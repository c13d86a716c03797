# SPDX-License-Identifier: Apache-2.0
"""Routing by prefixes, sessions, load and bounds; agreement of several gateways; random admissions."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.core.kv.block_hashes import BLOCK_TOKENS, block_hashes
from mizzen.gateway.admission.admission import Admission
from mizzen.gateway.admission.queue_entry import QueueEntry
from mizzen.gateway.errors import ApiError
from mizzen.gateway.openai.parse import RequestParser
from mizzen.gateway.routing.interfaces import EXPECTED_OUTPUT_TOKENS, ModelIdentity, RoutingQuery
from mizzen.gateway.routing.prefix_index import EnginePrefixes
from mizzen.gateway.routing.router import Router, default_router
from mizzen.gateway.routing.scorers import SMALL_LOAD_TOKENS
from mizzen.gateway.routing.session import (
    AFFINITY_HEADER,
    MAX_SESSION_CHARACTERS,
    SESSION_HEADER,
    get_session,
)


@dataclass(eq=False)
class FakeEngine:
    """An engine from which the router can choose; tests set its load and its cached prefixes."""

    name: str
    serving: bool = True
    full: bool = False
    suspect: bool = False
    load: float = 0.0
    context_length: int = 100_000
    model_identity: ModelIdentity = field(default_factory=lambda: ModelIdentity("m", "r", "t"))
    accepts_images: bool = False
    prefixes: EnginePrefixes = field(default_factory=EnginePrefixes)


def request(tokens: int = 640, seed: int = 0, **fields: Any) -> RoutingQuery:
    prompt = np.random.default_rng(seed).integers(0, 1000, tokens).astype(np.int32)
    options = {"tokenizer_hash": "t", "prompt_tokens": tokens, "context_tokens": tokens + 1, **fields}
    return RoutingQuery(**{"block_hashes": tuple(block_hashes(prompt)), **options})


def chosen(router: Router, query: RoutingQuery, engines: list[FakeEngine]) -> tuple[str, str]:
    route = router.route(query, engines)
    assert route is not None
    return route.engine.name, route.reason


def test_cached_prefix_attracts_requests() -> None:
    engines = [FakeEngine("a"), FakeEngine("b", load=1500), FakeEngine("c")]
    query = request()
    engines[1].prefixes.apply_event(query.block_hashes, ())
    route = default_router(125).route(query, engines)
    assert route is not None
    assert (route.engine.name, route.reason, route.matched_tokens) == ("b", "prefix", 640)


def test_without_a_cached_prefix_the_least_loaded_engine_wins() -> None:
    engines = [FakeEngine("a", load=90_000), FakeEngine("b", load=10_000), FakeEngine("c", load=50_000)]
    assert chosen(default_router(200), request(30, block_hashes=()), engines) == ("b", "load")


def test_small_load_difference_does_not_outweigh_a_prefix() -> None:
    """Load changes every millisecond, whereas a cached prefix certainly saves prefill work."""
    engines = [FakeEngine("a", load=400), FakeEngine("b", load=0), FakeEngine("c", load=0)]
    query = request()
    engines[0].prefixes.apply_event(query.block_hashes[:2], ())  # two of the prompt's ten blocks are cached
    assert chosen(default_router(125), query, engines) == ("a", "prefix")


def test_ties_go_to_the_less_loaded_of_two() -> None:
    """The less loaded of two randomly drawn engines is chosen, so the most loaded of all is never chosen."""
    engines = [FakeEngine(name, load=load) for name, load in (("a", 0.0), ("b", 20.0), ("c", 40.0))]
    router = default_router(125, random.Random(1))
    choices = Counter(chosen(router, request(30, block_hashes=()), engines)[0] for _ in range(600))
    assert choices["a"] == pytest.approx(400, abs=60)
    assert choices["b"] == pytest.approx(200, abs=60)
    assert choices["c"] == 0


@pytest.mark.parametrize("session", ["", "one conversation"])
def test_hot_prefix_spreads_over_engines(session: str) -> None:
    """All requests have the same prefix and, in one case, also the same session.

    Once the total load is large, the load of an engine exceeds 125 % of the mean by at most one request.
    """
    engines = [FakeEngine(name) for name in "abcd"]
    router = default_router(125)
    query = request(6400, session=session)
    for _ in range(200):
        route = router.route(query, engines)
        assert route is not None
        cost = 6400 - route.matched_tokens + EXPECTED_OUTPUT_TOKENS
        route.engine.load += cost
        route.engine.prefixes.add_guesses(query.block_hashes)
        mean = sum(engine.load for engine in engines) / len(engines)
        assert max(engine.load for engine in engines) <= max(SMALL_LOAD_TOKENS, 1.25 * mean) + cost
    loads = [engine.load for engine in engines]
    assert max(loads) <= 1.5 * sum(loads) / len(loads)


@settings(max_examples=100)
@given(
    loads=st.lists(st.floats(0, 1e6), min_size=2, max_size=8),
    tokens=st.integers(1, 4000),
    cached_on=st.data(),
)
def test_bounded_load_holds_for_any_cached_prefix(loads: list[float], tokens: int, cached_on: Any) -> None:
    engines = [FakeEngine(str(i), load=load) for i, load in enumerate(loads)]
    query = request(tokens, session="s")
    for engine in engines:
        engine.prefixes.apply_event(
            query.block_hashes[: cached_on.draw(st.integers(0, len(query.block_hashes)))], ()
        )
    route = default_router(150).route(query, engines)
    assert route is not None
    cost = tokens - route.matched_tokens + EXPECTED_OUTPUT_TOKENS
    bound = 1.5 * (sum(loads) + cost) / len(loads)
    assert route.engine.load + cost <= max(bound, SMALL_LOAD_TOKENS) or route.engine.load == min(loads)


@pytest.mark.parametrize(
    "left_out",
    [
        {"serving": False},
        {"full": True},
        {"model_identity": ModelIdentity("m", "r", "u")},
        {"context_length": 640},
    ],
)
def test_engine_that_cannot_take_a_request_is_excluded(left_out: dict[str, Any]) -> None:
    engines = [FakeEngine("a", **left_out), FakeEngine("b", load=1e9)]
    router = default_router(125)
    assert chosen(router, request(), engines) == ("b", "only")
    assert router.route(request(excluded=[engines[1]]), engines) is None


@pytest.mark.parametrize(
    "other", [ModelIdentity("m", "r2", "t"), ModelIdentity("n", "r", "t"), ModelIdentity("m", "r", "u")]
)
def test_resumed_answer_only_goes_to_the_same_model(other: ModelIdentity) -> None:
    engines = [FakeEngine("a", model_identity=other), FakeEngine("b", load=1e9)]
    pinned = request(pinned_model=ModelIdentity("m", "r", "t"))
    assert chosen(default_router(125), pinned, engines) == ("b", "only")
    assert default_router(125).route(pinned, engines[:1]) is None


def test_suspect_engine_gets_requests_only_if_no_other_can() -> None:
    engines = [FakeEngine("a", suspect=True), FakeEngine("b", load=1e9)]
    query = request()
    engines[0].prefixes.apply_event(query.block_hashes, ())
    router = default_router(125)
    assert chosen(router, query, engines) == ("b", "only")
    engines[1].full = True
    assert chosen(router, query, engines) == ("a", "only")


def test_sessions_keep_their_engine_and_few_move_on_changes() -> None:
    """If an engine leaves, only its sessions move, and they spread over the others (rendezvous hashing)."""
    names = [f"pod-{i}" for i in range(5)]
    query = [request(30, block_hashes=(), session=f"user-{i}") for i in range(300)]

    def homes(of: list[str]) -> list[str]:
        router = default_router(125)
        return [
            chosen(router, session_request, [FakeEngine(name) for name in of])[0] for session_request in query
        ]

    before, after = homes(names), homes(names[:-1])
    assert homes(names[::-1]) == before, "another gateway, another order: the same engines"
    assert {home for home, moved in zip(before, after, strict=True) if home != moved} == {"pod-4"}
    counts = Counter(before)
    assert min(counts.values()) > 30
    assert len({moved for home, moved in zip(before, after, strict=True) if home == "pod-4"}) == 4


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ([], "body"),
        ([(AFFINITY_HEADER, b"agent")], "agent"),
        ([(SESSION_HEADER, b"own")], "own"),
        ([(AFFINITY_HEADER, b"agent"), (SESSION_HEADER, b"own")], "own"),
        ([(SESSION_HEADER, b"own"), (AFFINITY_HEADER, b"agent")], "own"),
        ([(SESSION_HEADER, b""), (AFFINITY_HEADER, b"agent")], "agent"),
        ([(SESSION_HEADER, b""), (AFFINITY_HEADER, b"")], "body"),
    ],
)
def test_headers_name_the_session_before_the_body(headers: list[tuple[bytes, bytes]], session: str) -> None:
    assert get_session(headers, "body") == session


@pytest.mark.parametrize("field", ["user", "prompt_cache_key"])
def test_long_session_is_replaced_by_a_digest(field: str) -> None:
    """A session's name may fill a body; hashing it per engine and sequence would block the event loop."""

    def session(name: str) -> str:
        fields = {"model": "m", "messages": [{"role": "user", "content": "a"}], field: name}
        return RequestParser().parse_chat(json.dumps(fields).encode()).session

    name = "ä" * 3_500_000
    assert len(session(name)) <= MAX_SESSION_CHARACTERS
    assert session("long " * 20) == "blake2b:706ee26baa7ef166ca0e1fe8bc40d067", "after a restart too"
    for header in (SESSION_HEADER, AFFINITY_HEADER):
        assert get_session([(header, b"long " * 20)], "") == session("long " * 20)
    assert session(name) != session(name[1:])
    assert session("s" * MAX_SESSION_CHARACTERS) == "s" * MAX_SESSION_CHARACTERS
    engines = [FakeEngine(letter) for letter in "abcdefgh"]
    homes = {
        chosen(default_router(125), request(30, block_hashes=(), session=session(name)), order)[0]
        for order in (engines, engines[::-1])
    }
    assert len(homes) == 1


def test_independent_gateways_agree_on_a_new_prefix() -> None:
    """If four gateways route the first requests of a prefix at the same time, all choose the same engine."""
    for seed in range(20):
        homes = {
            chosen(default_router(125), request(seed=seed), [FakeEngine(name) for name in "abcd"])
            for _ in range(4)
        }
        assert len(homes) == 1
        assert homes.pop()[1] == "home"


def test_explain_matches_the_routing_decision() -> None:
    engines = [FakeEngine("a"), FakeEngine("b", load=400_000), FakeEngine("c", full=True), FakeEngine("d")]
    query = request(session="s")
    engines[0].prefixes.apply_event(query.block_hashes[:5], ())
    explained = {
        candidate.engine.name: candidate for candidate in default_router(125).explain(query, engines)
    }
    assert {name: candidate.excluded_by for name, candidate in explained.items()} == {
        "a": "",
        "b": "bounded",
        "c": "serving",
        "d": "",
    }
    assert explained["a"].scores["prefix"] == pytest.approx(1.0)
    assert explained["a"].matched_tokens == 320
    assert explained["a"].scores["session"] + explained["d"].scores["session"] == 1.0
    assert explained["a"].total > explained["d"].total
    assert not explained["b"].scores


def test_block_hashes_equal_those_of_the_engine() -> None:
    prompt = np.arange(BLOCK_TOKENS * 2 + 3, dtype=np.int32)
    prefixes = EnginePrefixes()
    prefixes.apply_event(tuple(block_hashes(prompt)), ())
    longer = np.concatenate([prompt[: BLOCK_TOKENS * 2], np.full(BLOCK_TOKENS, 7, np.int32)])
    assert prefixes.match_prefix(tuple(block_hashes(longer))) == 2
    assert prefixes.match_prefix(tuple(block_hashes(longer, b"another tenant"))) == 0


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_admission_is_fair_and_loses_no_capacity(seed: int) -> None:
    """Requests arrive, end, expire and are cancelled at random: admission is in order, counters are exact."""
    asyncio.run(admission_run(random.Random(seed)))


async def admission_run(draw: random.Random) -> None:
    capacity = 2
    admission = Admission(lambda: capacity, max_in_flight=3, queue_size=6)
    inside: set[int] = set()
    order: list[int] = []
    leave = {number: asyncio.Event() for number in range(30)}

    async def run_request(number: int) -> str:
        queue_entry = QueueEntry(asyncio.get_running_loop().time() + draw.choice([0.003, 5.0, 5.0]))
        try:
            await admission.enter(queue_entry)
        except ApiError as error:
            return str(error.status)
        order.append(number)
        inside.add(number)
        try:
            await leave[number].wait()
        finally:
            inside.discard(number)
            admission.leave(queue_entry)
        return "done"

    tasks: list[asyncio.Task[str]] = []
    for number in range(30):
        tasks.append(asyncio.create_task(run_request(number)))
        await asyncio.sleep(0.005 if draw.random() < 0.1 else 0)
        for task_number in list(inside):
            if draw.random() < 0.3:
                leave[task_number].set()
        if draw.random() < 0.1:
            draw.choice(tasks).cancel()
        if draw.random() < 0.3:
            capacity = draw.choice([0, 1, 2, 5])
            admission.admit_waiting()
        await asyncio.sleep(0)
        assert admission.in_flight >= len(inside)
        assert len(admission) <= 6
    capacity = 100
    for event in leave.values():
        event.set()
    admission.admit_waiting()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {result if isinstance(result, str) else type(result) for result in results} <= {
        "done",
        "429",
        "503",
        asyncio.CancelledError,
    }
    assert admission.in_flight == 0
    assert len(admission) == 0
    assert order == sorted(order), "first come, first served"
