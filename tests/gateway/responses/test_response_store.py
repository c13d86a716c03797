# SPDX-License-Identifier: Apache-2.0
"""The store of responses: its bounds, shares of owners, expiry, and accounting of shared turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mizzen.gateway.responses.response_store import (
    RESPONSE_OVERHEAD,
    ResponseStore,
    StoredResponse,
    StoreLimits,
    Turn,
)

LIMITS = StoreLimits(seconds=10, responses=6, bytes=8 * RESPONSE_OVERHEAD)


def stored(name: str, earlier: Turn | None = None, size: int = 10) -> StoredResponse:
    return StoredResponse(name, b"b" * size, Turn(b"t" * size, 1, earlier), {f"item-{name}": b"i" * size})


def test_full_store_removes_the_least_recently_used_response_of_the_largest_owner() -> None:
    store = ResponseStore(LIMITS)
    for name in ("a1", "a2", "a3"):
        store.add("a", stored(name))
    for owner in ("b", "c", "d"):
        store.add(owner, stored(owner))
    assert store.find("a", "a1") is not None
    store.add("b", stored("b2"))
    assert [store.find("a", name) is not None for name in ("a1", "a2", "a3")] == [True, False, True]
    assert all(store.find(owner, owner) for owner in "bcd")


def test_one_key_fills_at_most_half_of_the_store() -> None:
    store = ResponseStore(LIMITS)
    for number in range(5):
        store.add("a", stored(str(number)))
    assert [store.find("a", str(number)) is not None for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    keyless = ResponseStore(LIMITS)
    for number in range(7):
        keyless.add("", stored(str(number)))
    assert keyless.count == 6


@pytest.mark.parametrize("owner", ["", "a"])
def test_response_larger_than_the_share_is_not_kept(owner: str) -> None:
    store = ResponseStore(LIMITS)
    store.add(owner, stored("large", size=LIMITS.bytes))
    assert (store.count, store.bytes) == (0, 0)


def test_long_conversation_counts_each_turn_once() -> None:
    store = ResponseStore(StoreLimits(seconds=10, responses=10**6, bytes=10**9))
    response = stored("0")
    store.add("", response)
    for number in range(1, 5000):
        response = stored(str(number), response.turn)
        store.add("", response)
    assert store.bytes == 5000 * (RESPONSE_OVERHEAD + 30)
    assert len(response.turn.conversation()) == 5000
    for number in range(4999):
        assert store.remove("", str(number))
    assert store.bytes == RESPONSE_OVERHEAD + 20 + 5000 * 10
    assert store.remove("", "4999")
    assert store.bytes == 0


class StoreMachine(RuleBasedStateMachine):
    """Random operations of several owners; the store's numbers must equal those of its contents."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        clock: Callable[[], float] = lambda: self.now  # noqa: E731
        self.store = ResponseStore(LIMITS, clock)
        self.turns: dict[str, list[Turn]] = {"": [], "a": [], "b": []}
        self.added = 0

    @rule(owner=st.sampled_from(["", "a", "b"]), size=st.integers(0, 3000), back=st.integers(0, 3))
    def add(self, owner: str, size: int, back: int) -> None:
        turns = self.turns[owner]
        earlier = turns[-back] if 0 < back <= len(turns) else None
        response = stored(f"{owner}{self.added}", earlier, size)
        turns.append(response.turn)
        self.added += 1
        self.store.add(owner, response)

    @rule(owner=st.sampled_from(["", "a", "b"]), number=st.integers(0, 20))
    def use(self, owner: str, number: int) -> None:
        found = self.store.find(owner, f"{owner}{number}")
        assert found is None or found.id == f"{owner}{number}"
        assert (self.store.find_item(owner, f"item-{owner}{number}") is None) is (found is None)
        for other in {"", "a", "b"} - {owner}:
            assert self.store.find(other, f"{owner}{number}") is None or owner == ""

    @rule(owner=st.sampled_from(["", "a", "b"]), number=st.integers(0, 20))
    def remove(self, owner: str, number: int) -> None:
        known = self.store.find(owner, f"{owner}{number}") is not None
        assert self.store.remove(owner, f"{owner}{number}") is known

    @rule(seconds=st.sampled_from([0.5, 4, 11]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.store.remove_expired()

    @invariant()
    def bounds_and_numbers_hold(self) -> None:
        responses = [each for owned in self.store._owners.values() for each in owned.responses.values()]
        turns = {id(turn): turn for each in responses for turn in each.turn.conversation()}
        size = sum(each.size for each in responses) + sum(len(turn.items) for turn in turns.values())
        assert (self.store.count, self.store.bytes) == (len(responses), size)
        assert self.store.count <= LIMITS.responses
        assert self.store.bytes <= LIMITS.bytes
        for owned in self.store._owners.values():
            expiry = [each.expires for each in owned.responses.values()]
            assert expiry == sorted(expiry)
            assert len(owned.items) == len(owned.responses)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
