"""What the watch makes of pulses, by a clock of the test's."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.server.ranks.heartbeat import HeartbeatReader, HeartbeatWriter, RankHeartbeat, create_heartbeats
from mizzen.server.ranks.stall_detector import STARTUP_SECONDS, StallDetector


def heartbeats(*ranks: tuple[float, int, int]) -> list[RankHeartbeat]:
    return [RankHeartbeat(alive, launched, done, 100 + i) for i, (alive, launched, done) in enumerate(ranks)]


def test_ranks_that_keep_up_are_left_alone() -> None:
    watch = StallDetector(2, 5.0, 5.0)
    for now in range(1, 60):
        step = 3 * now
        assert (
            watch.find_fault(heartbeats((now, step, step - 2), (now, step - 1, step - 3)), float(now)) is None
        )


def test_idle_ranks_are_left_alone() -> None:
    watch = StallDetector(2, 5.0, 5.0)
    assert all(
        watch.find_fault(heartbeats((now, 9, 9), (now, 9, 9)), float(now)) is None for now in range(1, 60)
    )


def loading(*alive: float) -> list[RankHeartbeat]:
    return [RankHeartbeat(at, 0, 0, 100 + i, serving=False) for i, at in enumerate(alive)]


def test_ranks_that_load_may_hold_all_of_their_threads_for_long_and_not_for_ever() -> None:
    """The first one has not even come to where it could tell."""
    watch = StallDetector(3, 5.0, 5.0)
    found = [watch.find_fault(loading(0.0, now, 1.0), float(now)) for now in range(1, 80)]
    (first,) = {found.index(one) for one in found if one} & set(range(int(STARTUP_SECONDS), 62))
    assert not any(found[:first])
    assert (found[first] or "").startswith("rank 2 (process 102) has not run for 6")


def test_a_rank_that_serves_before_others_need_not_keep_up_with_them() -> None:
    watch = StallDetector(2, 5.0, 5.0)
    for now in range(1, 40):
        both = [RankHeartbeat(float(now), 9, 0, 100), RankHeartbeat(float(now), 0, 0, 101, serving=False)]
        assert watch.find_fault(both, float(now)) is None


def test_ranks_that_end_are_left_alone() -> None:
    watch = StallDetector(2, 5.0, 5.0)
    assert all(
        watch.find_fault(heartbeats((1.0, 9, 9), (0.0, 9, 9)), float(now)) is None for now in range(1, 99)
    )


def stopped(now: float) -> list[RankHeartbeat]:
    return heartbeats((now, 9, 7), (2.0, 7, 7))


def behind(now: float) -> list[RankHeartbeat]:
    return heartbeats((now, 9, 7), (now, 7, 7))


def hanging(now: float) -> list[RankHeartbeat]:
    return heartbeats((now, 9, 7), (now, 9, 7))


@pytest.mark.parametrize("fault", [stopped, behind, hanging])
def test_time_in_which_nobody_looks_is_nobodys_fault(fault: Callable[[float], list[RankHeartbeat]]) -> None:
    """All stood still from 2.5 to 100; who stands still after that is found in time."""
    watch = StallDetector(2, 5.0, 5.0)
    assert [watch.find_fault(fault(now), now) for now in (2.0, 2.5, 100.0, 101.0, 102.0)] == [None] * 5
    found = [watch.find_fault(fault(now), now) for now in (103.0, 104.0, 105.0, 105.5)]
    assert any(found)


def test_a_watcher_that_looks_seldom_finds_who_is_stopped_all_the_same() -> None:
    watch = StallDetector(2, 5.0, 5.0)
    assert any(watch.find_fault(stopped(now), now) for now in (2.0, 5.0, 8.0, 11.0, 14.0, 17.0, 20.0))


def test_the_rank_that_looks_does_not_judge_itself() -> None:
    """What holds it up is the program, such as a compiler, for as long as it likes."""
    watch = StallDetector(2, 5.0, 5.0, own_rank=0)
    for now in range(2, 60):
        assert watch.find_fault(heartbeats((1.0, 3, 3), (now, 4, 4)), float(now)) is None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (stopped, r"rank 1 (process 101) has not run for"),
        (behind, r"rank 1 (process 101) is at step 7 for"),
        (hanging, r"rank 0 (process 100) has run step 8 for"),
    ],
)
def test_who_holds_up_the_others_is_named(fault: Callable[[float], list[RankHeartbeat]], said: str) -> None:
    watch = StallDetector(2, 5.0, 8.0)
    found = [watch.find_fault(fault(float(now)), float(now)) for now in range(2, 13)]
    assert found[:5] == [None] * 5
    assert next(one for one in found if one).startswith(said)


@settings(max_examples=100)
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=60))
def test_no_rank_that_moves_in_time_is_at_fault(steps: list[tuple[int, int]]) -> None:
    """Ranks move by any steps, at least by one each in any four seconds in which they are behind."""
    watch, done = StallDetector(2, 5.0, 5.0), [0, 0]
    for now, moves in enumerate(steps, 1):
        done = [at + move + (now % 4 == 0) for at, move in zip(done, moves, strict=True)]
        found = watch.find_fault(heartbeats(*((now, at + 1, at) for at in done)), float(now))
        assert found is None


def test_a_pulse_is_read_as_it_was_written() -> None:
    descriptor = create_heartbeats(2)
    reader, writer = HeartbeatReader(descriptor, 2), HeartbeatWriter(descriptor, 1)
    assert reader.read()[1].alive == 0.0
    writer.start()
    assert not reader.read()[1].serving
    writer.mark_serving()
    writer.launched(5)
    writer.done(4)
    pulse = reader.read()[1]
    assert (pulse.launched, pulse.done, pulse.serving) == (5, 4, True)
    assert 0 < pulse.alive <= time.monotonic()
    writer.close()
    assert reader.read()[1].alive == 0.0
    assert reader.read()[0].process == 0
