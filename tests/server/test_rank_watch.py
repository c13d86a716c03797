"""What the watch makes of pulses, by a clock of the test's."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.server.ranks.heartbeat import Pulse, PulseReader, PulseWriter, create_pulses
from mizzen.server.ranks.stall_detector import START_SECONDS, RankWatch


def pulses(*ranks: tuple[float, int, int]) -> list[Pulse]:
    return [Pulse(alive, launched, done, 100 + i) for i, (alive, launched, done) in enumerate(ranks)]


def test_ranks_that_keep_up_are_left_alone() -> None:
    watch = RankWatch(2, 5.0, 5.0)
    for now in range(1, 60):
        step = 3 * now
        assert watch.look(pulses((now, step, step - 2), (now, step - 1, step - 3)), float(now)) is None


def test_idle_ranks_are_left_alone() -> None:
    watch = RankWatch(2, 5.0, 5.0)
    assert all(watch.look(pulses((now, 9, 9), (now, 9, 9)), float(now)) is None for now in range(1, 60))


def loading(*alive: float) -> list[Pulse]:
    return [Pulse(at, 0, 0, 100 + i, serves=False) for i, at in enumerate(alive)]


def test_ranks_that_load_may_hold_all_of_their_threads_for_long_and_not_for_ever() -> None:
    """The first one has not even come to where it could tell."""
    watch = RankWatch(3, 5.0, 5.0)
    found = [watch.look(loading(0.0, now, 1.0), float(now)) for now in range(1, 80)]
    (first,) = {found.index(one) for one in found if one} & set(range(int(START_SECONDS), 62))
    assert not any(found[:first])
    assert (found[first] or "").startswith("rank 2 (process 102) has not run for 6")


def test_a_rank_that_serves_before_others_need_not_keep_up_with_them() -> None:
    watch = RankWatch(2, 5.0, 5.0)
    for now in range(1, 40):
        both = [Pulse(float(now), 9, 0, 100), Pulse(float(now), 0, 0, 101, serves=False)]
        assert watch.look(both, float(now)) is None


def test_ranks_that_end_are_left_alone() -> None:
    watch = RankWatch(2, 5.0, 5.0)
    assert all(watch.look(pulses((1.0, 9, 9), (0.0, 9, 9)), float(now)) is None for now in range(1, 99))


def stopped(now: float) -> list[Pulse]:
    return pulses((now, 9, 7), (2.0, 7, 7))


def behind(now: float) -> list[Pulse]:
    return pulses((now, 9, 7), (now, 7, 7))


def hanging(now: float) -> list[Pulse]:
    return pulses((now, 9, 7), (now, 9, 7))


@pytest.mark.parametrize("fault", [stopped, behind, hanging])
def test_time_in_which_nobody_looks_is_nobodys_fault(fault: Callable[[float], list[Pulse]]) -> None:
    """All stood still from 2.5 to 100; who stands still after that is found in time."""
    watch = RankWatch(2, 5.0, 5.0)
    assert [watch.look(fault(now), now) for now in (2.0, 2.5, 100.0, 101.0, 102.0)] == [None] * 5
    found = [watch.look(fault(now), now) for now in (103.0, 104.0, 105.0, 105.5)]
    assert any(found)


def test_a_watcher_that_looks_seldom_finds_who_is_stopped_all_the_same() -> None:
    watch = RankWatch(2, 5.0, 5.0)
    assert any(watch.look(stopped(now), now) for now in (2.0, 5.0, 8.0, 11.0, 14.0, 17.0, 20.0))


def test_the_rank_that_looks_does_not_judge_itself() -> None:
    """What holds it up is the program, such as a compiler, for as long as it likes."""
    watch = RankWatch(2, 5.0, 5.0, itself=0)
    for now in range(2, 60):
        assert watch.look(pulses((1.0, 3, 3), (now, 4, 4)), float(now)) is None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (stopped, r"rank 1 (process 101) has not run for"),
        (behind, r"rank 1 (process 101) is at step 7 for"),
        (hanging, r"rank 0 (process 100) has run step 8 for"),
    ],
)
def test_who_holds_up_the_others_is_named(fault: Callable[[float], list[Pulse]], said: str) -> None:
    watch = RankWatch(2, 5.0, 8.0)
    found = [watch.look(fault(float(now)), float(now)) for now in range(2, 13)]
    assert found[:5] == [None] * 5
    assert next(one for one in found if one).startswith(said)


@settings(max_examples=100)
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=60))
def test_no_rank_that_moves_in_time_is_at_fault(steps: list[tuple[int, int]]) -> None:
    """Ranks move by any steps, at least by one each in any four seconds in which they are behind."""
    watch, done = RankWatch(2, 5.0, 5.0), [0, 0]
    for now, moves in enumerate(steps, 1):
        done = [at + move + (now % 4 == 0) for at, move in zip(done, moves, strict=True)]
        found = watch.look(pulses(*((now, at + 1, at) for at in done)), float(now))
        assert found is None


def test_a_pulse_is_read_as_it_was_written() -> None:
    descriptor = create_pulses(2)
    reader, writer = PulseReader(descriptor, 2), PulseWriter(descriptor, 1)
    assert reader.read()[1].alive == 0.0
    writer.start()
    assert not reader.read()[1].serves
    writer.serves()
    writer.launched(5)
    writer.done(4)
    pulse = reader.read()[1]
    assert (pulse.launched, pulse.done, pulse.serves) == (5, 4, True)
    assert 0 < pulse.alive <= time.monotonic()
    writer.close()
    assert reader.read()[1].alive == 0.0
    assert reader.read()[0].process == 0
