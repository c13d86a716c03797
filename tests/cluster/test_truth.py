"""The checker of the truth: what it calls wrong, for how long, and that no lie of a status escapes it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from noloss.truth import (
    API_FAULTS_SECONDS,
    ENDED_SECONDS,
    HUNG_SECONDS,
    Beat,
    Fault,
    Probe,
    Shown,
    Strain,
    Wrong,
    stretches,
    summary,
    wrongs,
)


def probes(*words: str) -> list[Probe]:
    """Probes a tenth of a second apart: `+` is answered at once, `-` has its deadline a second later."""
    return [
        Probe(number / 10, number / 10 + (0.0 if sign == "+" else 1.0), sign == "+")
        for number, sign in enumerate("".join(words))
    ]


def found(*args: object) -> list[tuple[float, float, bool, str]]:
    return [(round(w.begin, 2), round(w.end, 2), w.available, w.cause) for w in wrongs(*args)]  # type: ignore[arg-type]


def test_a_status_that_follows_is_never_wrong() -> None:
    assert not wrongs(probes("+" * 20), [Shown(0.0, True)], [])
    outage = probes("+" * 10, "-" * 10, "+" * 10)
    assert not wrongs(outage, [Shown(0.0, True), Shown(0.95, False), Shown(1.95, True)], [])


def test_a_status_that_stays_is_wrong_from_the_first_failed_probe_to_the_last() -> None:
    outage = probes("+" * 10, "-" * 10, "+" * 10)
    assert found(outage, [Shown(0.0, True)], []) == [(1.0, 1.9, True, "none")]
    assert found(outage, [Shown(0.0, True), Shown(1.5, False)], [Fault(0.9, "ended")]) == [
        (1.0, 1.5, True, "ended"),
        (2.0, 2.9, False, "ended"),
    ]


def test_a_request_that_was_held_says_that_it_works_only_when_its_answer_comes() -> None:
    held = [Probe(0.0, 0.9, True)]
    assert stretches(held) == [(0.9, 0.9, True)]
    assert not wrongs([*held, Probe(1.0, 1.0, True)], [Shown(0.0, False), Shown(0.9, True)], [])


def test_nothing_is_wrong_where_there_is_no_condition() -> None:
    assert not wrongs(probes("-" * 20), [Shown(0.0, None)], [])


def test_what_works_now_and_then_is_no_long_stretch() -> None:
    assert not wrongs(probes("-+" * 20), [Shown(0.0, True)], [Fault(0.0, "hung")])


@pytest.mark.parametrize(
    ("available", "faults", "allowed"),
    [
        (True, [Fault(1.0, "ended")], ENDED_SECONDS),
        (True, [Fault(1.0, "hung")], HUNG_SECONDS),
        (False, [Fault(1.0, "hung")], ENDED_SECONDS),
        (True, [Fault(1.0, "hung"), Fault(2.0, "ended")], ENDED_SECONDS),
        (True, [], ENDED_SECONDS),
        (True, [Fault(-100.0, "hung")], ENDED_SECONDS),
        (True, [Fault(0.0, "api_faults"), Fault(1.0, "hung")], API_FAULTS_SECONDS),
        (True, [Fault(0.0, "api_faults"), Fault(1.5, "api_well")], API_FAULTS_SECONDS),
        (True, [Fault(-100.0, "api_faults"), Fault(-90.0, "api_well"), Fault(1.0, "hung")], HUNG_SECONDS),
    ],
)
def test_how_long_is_allowed_follows_from_the_latest_fault(
    available: bool, faults: list[Fault], allowed: float
) -> None:
    signs = "-" if available else "+"
    (wrong,) = wrongs(
        [Probe(2 + n / 10, 2 + n / 10, signs == "+") for n in range(30)], [Shown(0.0, available)], faults
    )
    assert wrong.allowed == allowed


def test_a_machine_without_a_free_core_explains_more() -> None:
    wrong = Wrong(10.0, 12.0, True, "ended")
    free = [Beat(9 + n / 10, 0.0, 0.9) for n in range(40)]
    late = [*free, Beat(11.0, 0.3, 0.9)]
    starved = [Beat(9 + n / 10, 0.0, 0.05) for n in range(40)]
    elsewhere = [Beat(30.0, 5.0, 0.0), *free]
    assert Strain(free).allowed(wrong) == ENDED_SECONDS
    assert Strain(elsewhere).allowed(wrong) == ENDED_SECONDS
    assert Strain(late).allowed(wrong) == pytest.approx(ENDED_SECONDS + 3)
    assert Strain(starved).allowed(wrong) == pytest.approx(10 * ENDED_SECONDS)


def test_a_report_counts_what_is_over() -> None:
    told = summary([Wrong(0, 0.5, True, "ended"), Wrong(5, 7, True, "ended"), Wrong(9, 11, True, "hung")])
    assert told["ended_said_available"] == {"times": 2, "longest_s": 2, "over": 1, "allowed_s": 1.0}
    assert told["hung_said_available"]["over"] == 0


@given(
    ends=st.lists(st.floats(0.5, 5.0), min_size=1, max_size=5),
    late=st.lists(st.floats(0.0, 3.0), min_size=10, max_size=10),
)
def test_every_delay_of_a_status_is_found_to_a_tenth_of_a_second(
    ends: list[float], late: list[float]
) -> None:
    """A service that works and does not in turn, and a status that follows with these delays."""
    turns = [0.0]
    for seconds in ends:
        turns.append(turns[-1] + seconds + 3.5)
    until = turns[-1] + 5
    truth = [(at, number % 2 == 0) for number, at in enumerate(turns)]
    shown = [Shown(at + (late[n] if n else 0.0), works) for n, (at, works) in enumerate(truth)]
    sent = [step / 50 for step in range(int(until * 50))]
    taken = [Probe(at, at, next(w for begin, w in reversed(truth) if begin <= at)) for at in sent]
    measured = {round(wrong.begin, 1): wrong for wrong in wrongs(taken, shown, []) if wrong.seconds > 0.1}
    delays = {at: delay for at, delay in zip(turns[1:], late[1:], strict=False) if delay > 0.15}
    for at, delay in delays.items():
        near = [wrong for wrong in measured.values() if abs(wrong.begin - at) < 0.05]
        assert [wrong.seconds for wrong in near] == [pytest.approx(delay, abs=0.05)]
    assert len(measured) <= sum(delay > 0.05 for delay in late[1 : len(turns)])
