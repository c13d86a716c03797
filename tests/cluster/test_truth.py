# SPDX-License-Identifier: Apache-2.0
"""The checker of statuses finds every interval in which a status was wrong, and applies the right limit."""

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
    Fault,
    MachineSample,
    MachineStrain,
    ObservedStatus,
    Probe,
    WrongStatus,
    find_intervals,
    find_wrong_statuses,
    summary,
)


def probes(*words: str) -> list[Probe]:
    """Return probes sent every 0.1 s: `+` is answered at once, `-` fails at its deadline after 1 s."""
    return [
        Probe(number / 10, number / 10 + (0.0 if sign == "+" else 1.0), sign == "+")
        for number, sign in enumerate("".join(words))
    ]


def wrong_intervals(*args: object) -> list[tuple[float, float, bool, str]]:
    return [(round(w.begin, 2), round(w.end, 2), w.available, w.cause) for w in find_wrong_statuses(*args)]  # type: ignore[arg-type]


def test_a_status_that_follows_the_service_at_once_is_never_wrong() -> None:
    assert not find_wrong_statuses(probes("+" * 20), [ObservedStatus(0.0, True)], [])
    outage = probes("+" * 10, "-" * 10, "+" * 10)
    assert not find_wrong_statuses(
        outage, [ObservedStatus(0.0, True), ObservedStatus(0.95, False), ObservedStatus(1.95, True)], []
    )


def test_a_status_that_ignores_an_outage_is_wrong_from_the_first_to_the_last_failed_probe() -> None:
    outage = probes("+" * 10, "-" * 10, "+" * 10)
    assert wrong_intervals(outage, [ObservedStatus(0.0, True)], []) == [(1.0, 1.9, True, "none")]
    assert wrong_intervals(
        outage, [ObservedStatus(0.0, True), ObservedStatus(1.5, False)], [Fault(0.9, "ended")]
    ) == [
        (1.0, 1.5, True, "ended"),
        (2.0, 2.9, False, "ended"),
    ]


def test_a_held_probe_shows_that_the_service_works_only_when_its_answer_comes() -> None:
    held = [Probe(0.0, 0.9, True)]
    assert find_intervals(held) == [(0.9, 0.9, True)]
    assert not find_wrong_statuses(
        [*held, Probe(1.0, 1.0, True)], [ObservedStatus(0.0, False), ObservedStatus(0.9, True)], []
    )


def test_without_the_condition_no_status_is_wrong() -> None:
    assert not find_wrong_statuses(probes("-" * 20), [ObservedStatus(0.0, None)], [])


def test_alternating_probes_make_no_wrong_interval() -> None:
    assert not find_wrong_statuses(probes("-+" * 20), [ObservedStatus(0.0, True)], [Fault(0.0, "hung")])


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
def test_the_limit_follows_from_the_latest_fault(
    available: bool, faults: list[Fault], allowed: float
) -> None:
    signs = "-" if available else "+"
    (wrong,) = find_wrong_statuses(
        [Probe(2 + n / 10, 2 + n / 10, signs == "+") for n in range(30)],
        [ObservedStatus(0.0, available)],
        faults,
    )
    assert wrong.allowed == allowed


def test_a_machine_without_a_free_core_relaxes_the_limit() -> None:
    wrong = WrongStatus(10.0, 12.0, True, "ended")
    free = [MachineSample(9 + n / 10, 0.0, 0.9) for n in range(40)]
    late = [*free, MachineSample(11.0, 0.3, 0.9)]
    starved = [MachineSample(9 + n / 10, 0.0, 0.05) for n in range(40)]
    elsewhere = [MachineSample(30.0, 5.0, 0.0), *free]
    assert MachineStrain(free).allowed(wrong) == ENDED_SECONDS
    assert MachineStrain(elsewhere).allowed(wrong) == ENDED_SECONDS
    assert MachineStrain(late).allowed(wrong) == pytest.approx(ENDED_SECONDS + 3)
    assert MachineStrain(starved).allowed(wrong) == pytest.approx(10 * ENDED_SECONDS)


def test_a_summary_counts_violations_of_the_limit() -> None:
    totals = summary(
        [
            WrongStatus(0, 0.5, True, "ended"),
            WrongStatus(5, 7, True, "ended"),
            WrongStatus(9, 11, True, "hung"),
        ]
    )
    assert totals["ended_said_available"] == {"times": 2, "longest_s": 2, "over": 1, "allowed_s": 1.0}
    assert totals["hung_said_available"]["over"] == 0


@given(
    ends=st.lists(st.floats(0.5, 5.0), min_size=1, max_size=5),
    late=st.lists(st.floats(0.0, 3.0), min_size=10, max_size=10),
)
def test_every_delay_of_a_status_is_found_to_a_tenth_of_a_second(
    ends: list[float], late: list[float]
) -> None:
    """The service alternates between working and failing, and its status follows with the delays `late`."""
    turns = [0.0]
    for seconds in ends:
        turns.append(turns[-1] + seconds + 3.5)
    until = turns[-1] + 5
    truth = [(at, number % 2 == 0) for number, at in enumerate(turns)]
    observed = [ObservedStatus(at + (late[n] if n else 0.0), works) for n, (at, works) in enumerate(truth)]
    sent = [step / 50 for step in range(int(until * 50))]
    taken = [Probe(at, at, next(w for begin, w in reversed(truth) if begin <= at)) for at in sent]
    measured = {
        round(wrong.begin, 1): wrong
        for wrong in find_wrong_statuses(taken, observed, [])
        if wrong.seconds > 0.1
    }
    delays = {at: delay for at, delay in zip(turns[1:], late[1:], strict=False) if delay > 0.15}
    for at, delay in delays.items():
        near = [wrong for wrong in measured.values() if abs(wrong.begin - at) < 0.05]
        assert [wrong.seconds for wrong in near] == [pytest.approx(delay, abs=0.05)]
    assert len(measured) <= sum(delay > 0.05 for delay in late[1 : len(turns)])
