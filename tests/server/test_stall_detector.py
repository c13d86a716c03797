# SPDX-License-Identifier: Apache-2.0
"""Faults that the stall detector finds in heartbeats, with a simulated clock."""

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


def test_ranks_that_keep_up_are_not_at_fault() -> None:
    detector = StallDetector(2, 5.0, 5.0)
    for now in range(1, 60):
        step = 3 * now
        assert (
            detector.find_fault(heartbeats((now, step, step - 2), (now, step - 1, step - 3)), float(now))
            is None
        )


def test_idle_ranks_are_not_at_fault() -> None:
    detector = StallDetector(2, 5.0, 5.0)
    assert all(
        detector.find_fault(heartbeats((now, 9, 9), (now, 9, 9)), float(now)) is None for now in range(1, 60)
    )


def loading(*alive: float) -> list[RankHeartbeat]:
    return [RankHeartbeat(at, 0, 0, 100 + i, serving=False) for i, at in enumerate(alive)]


def test_a_loading_rank_may_block_its_threads_up_to_the_startup_limit() -> None:
    """Rank 0 has not written a heartbeat yet, rank 1 is alive, and rank 2 is silent from second 1 on."""
    detector = StallDetector(3, 5.0, 5.0)
    faults = [detector.find_fault(loading(0.0, now, 1.0), float(now)) for now in range(1, 80)]
    (first,) = {faults.index(text) for text in faults if text} & set(range(int(STARTUP_SECONDS), 62))
    assert not any(faults[:first])
    assert (faults[first] or "").startswith("rank 2 (process 102) has not run for 6")


def test_lag_is_not_checked_before_all_ranks_serve() -> None:
    detector = StallDetector(2, 5.0, 5.0)
    for now in range(1, 40):
        beats = [RankHeartbeat(float(now), 9, 0, 100), RankHeartbeat(float(now), 0, 0, 101, serving=False)]
        assert detector.find_fault(beats, float(now)) is None


def test_exiting_ranks_are_not_at_fault() -> None:
    detector = StallDetector(2, 5.0, 5.0)
    assert all(
        detector.find_fault(heartbeats((1.0, 9, 9), (0.0, 9, 9)), float(now)) is None for now in range(1, 99)
    )


def stopped(now: float) -> list[RankHeartbeat]:
    return heartbeats((now, 9, 7), (2.0, 7, 7))


def behind(now: float) -> list[RankHeartbeat]:
    return heartbeats((now, 9, 7), (now, 7, 7))


def hanging(now: float) -> list[RankHeartbeat]:
    return heartbeats((now, 9, 7), (now, 9, 7))


@pytest.mark.parametrize("fault", [stopped, behind, hanging])
def test_gaps_of_the_monitor_are_excluded_from_deadlines(
    fault: Callable[[float], list[RankHeartbeat]],
) -> None:
    """All processes stand still from 2.5 s to 100 s; if a fault remains, it is found by 105.5 s."""
    detector = StallDetector(2, 5.0, 5.0)
    assert [detector.find_fault(fault(now), now) for now in (2.0, 2.5, 100.0, 101.0, 102.0)] == [None] * 5
    faults = [detector.find_fault(fault(now), now) for now in (103.0, 104.0, 105.0, 105.5)]
    assert any(faults)


def test_a_stopped_rank_is_found_even_if_checks_are_rare() -> None:
    detector = StallDetector(2, 5.0, 5.0)
    assert any(detector.find_fault(stopped(now), now) for now in (2.0, 5.0, 8.0, 11.0, 14.0, 17.0, 20.0))


def test_the_monitoring_rank_is_never_at_fault_itself() -> None:
    """The monitoring rank runs in the user's program, which may block it for any length of time."""
    detector = StallDetector(2, 5.0, 5.0, own_rank=0)
    for now in range(2, 60):
        assert detector.find_fault(heartbeats((1.0, 3, 3), (now, 4, 4)), float(now)) is None


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (stopped, r"rank 1 (process 101) has not run for"),
        (behind, r"rank 1 (process 101) has been at step 7 for"),
        (hanging, r"rank 0 (process 100) has been running step 8 for"),
    ],
)
def test_the_stalling_rank_is_reported(fault: Callable[[float], list[RankHeartbeat]], reason: str) -> None:
    detector = StallDetector(2, 5.0, 8.0)
    faults = [detector.find_fault(fault(float(now)), float(now)) for now in range(2, 13)]
    assert faults[:5] == [None] * 5
    assert next(text for text in faults if text).startswith(reason)


@settings(max_examples=100)
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=60))
def test_a_rank_that_advances_in_time_is_never_at_fault(steps: list[tuple[int, int]]) -> None:
    """Ranks advance by random numbers of steps, and by at least one step every four seconds."""
    detector, done = StallDetector(2, 5.0, 5.0), [0, 0]
    for now, moves in enumerate(steps, 1):
        done = [at + move + (now % 4 == 0) for at, move in zip(done, moves, strict=True)]
        faults = detector.find_fault(heartbeats(*((now, at + 1, at) for at in done)), float(now))
        assert faults is None


def test_a_heartbeat_is_read_as_written() -> None:
    descriptor = create_heartbeats(2)
    reader, writer = HeartbeatReader(descriptor, 2), HeartbeatWriter(descriptor, 1)
    assert reader.read()[1].alive == 0.0
    writer.start()
    assert not reader.read()[1].serving
    writer.mark_serving()
    writer.launched(5)
    writer.done(4)
    heartbeat = reader.read()[1]
    assert (heartbeat.launched, heartbeat.done, heartbeat.serving) == (5, 4, True)
    assert 0 < heartbeat.alive <= time.monotonic()
    writer.close()
    assert reader.read()[1].alive == 0.0
    assert reader.read()[0].process == 0
