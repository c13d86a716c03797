# SPDX-License-Identifier: Apache-2.0
"""Rollout state in a status: stable revision, progress deadline, restart budget."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mizzen_operator.api.types import InferenceService, Prompt, Rollout, Verification
from mizzen_operator.pods.group import Group
from mizzen_operator.rollout.progress import is_overdue, seconds_to_deadline, update_state
from mizzen_operator.rollout.restart_budget import add_failures
from mizzen_operator.rollout.state import Abandoned, RolloutState, load_state
from mizzen_operator.status.conditions import build_conditions as every_condition
from service_kit import GOOD, OLD, SERVING, group, rolling

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
FAILING = [group("a2", restarts=3), group("a3", restarts=3)]


def after(
    before: InferenceService, groups: list[Group], seconds: float = 0, serves: str = "ab", newest: str = "a"
) -> InferenceService:
    """Return the service with the status that a reconcile with these groups writes.

    Args:
        before: the service before the reconcile.
        groups: the observed groups.
        seconds: time of the reconcile, in seconds after `NOW`.
        serves: revisions whose groups serve, one letter each.
        newest: revision of the spec.
    """
    serving = frozenset(group.uid for group in groups if group.revision in serves)
    memory = update_state(before, newest, groups, serving, NOW + timedelta(seconds=seconds))
    entries = [{"name": group.name, "restarts": group.restarts} for group in groups]
    return replace(before, status=json.loads(json.dumps({**memory.as_status(), "groups": entries})))


def test_the_newest_revision_becomes_stable_once_it_alone_serves() -> None:
    demo = after(rolling(replicas=2), [group("a0")])
    assert load_state(demo.status).stable_revision == ""
    demo = after(demo, [group("a0"), group("a1")])
    assert load_state(demo.status).stable_revision == "a"
    demo = after(demo, [group("a0"), group("a1"), group("b2")], newest="b")
    assert load_state(demo.status).stable_revision == "a"
    demo = after(demo, [group("b1"), group("b2")], serves="a", newest="b")
    assert load_state(demo.status).stable_revision == "a"
    assert load_state(after(demo, [group("b1"), group("b2")], newest="b").status).stable_revision == "b"


def test_the_newest_revision_becomes_stable_at_zero_groups_unless_paused() -> None:
    demo = after(rolling(), [group("a0")])
    assert load_state(after(replace(demo, replicas=0), [], newest="b").status).stable_revision == "b"
    paused = replace(demo, replicas=0, rollout=Rollout(paused=True))
    assert load_state(after(paused, [], newest="b").status).stable_revision == "a"


@pytest.mark.parametrize(
    "given",
    [Rollout(partition=1), Rollout(verification=Verification((Prompt("2 + 2 =", "4", 16),), "Rollback", 30))],
    ids=["partition", "verification"],
)
def test_a_revision_on_trial_does_not_become_stable_at_zero_groups(given: Rollout) -> None:
    """Otherwise scaling to zero would end a canary, or accept a revision that fails its golden prompts."""
    demo = after(rolling(given), [group("a0")])
    assert load_state(demo.status).stable_revision == "a"
    assert load_state(after(replace(demo, replicas=0), [], newest="b").status).stable_revision == "a"
    assert load_state(after(rolling(given, replicas=0), []).status).stable_revision == ""


def test_another_revision_becomes_stable_if_the_stable_one_has_no_groups_left() -> None:
    demo = after(rolling(replicas=3), [group(f"a{number}") for number in range(3)])
    half = [group("b0"), group("b1"), replace(group("b2"), containers_ready=False)]
    demo = after(demo, [group("a0"), *half[1:]], newest="b")
    assert load_state(demo.status).stable_revision == "a"
    assert load_state(after(demo, half, newest="b").status).stable_revision == "a", (
        "to go back to, until it serves whole"
    )
    assert load_state(after(demo, [group("a0"), *half[1:]], newest="c").status).stable_revision == "a"
    assert load_state(after(demo, half, newest="c").status).stable_revision == "b"


def test_without_a_status_the_revision_with_most_groups_is_stable() -> None:
    demo = after(rolling(replicas=3), [group("b0"), group("a1"), group("b2"), group("c3")], newest="a")
    assert load_state(demo.status).stable_revision == "b"


def test_the_deadline_restarts_with_progress_and_not_with_a_setback() -> None:
    demo = after(rolling(replicas=2), [])
    assert seconds_to_deadline(demo, load_state(demo.status), NOW) == 600
    demo = after(demo, [group("a0")], 100)
    demo = after(demo, [group("a0")], 200, serves="")
    demo = after(demo, [group("a0")], 300)
    memory = load_state(demo.status)
    assert seconds_to_deadline(demo, memory, NOW + timedelta(seconds=300)) == 400
    assert not is_overdue(demo, memory, NOW + timedelta(seconds=699))
    assert is_overdue(demo, memory, NOW + timedelta(seconds=700))
    demo = after(demo, [group("a0"), group("a1")], 800)
    assert seconds_to_deadline(demo, load_state(demo.status), NOW + timedelta(days=9)) is None
    up = after(replace(demo, replicas=3), [group("a0"), group("a1")], 900)
    assert seconds_to_deadline(up, load_state(up.status), NOW + timedelta(seconds=900)) == 600


def test_a_paused_rollout_is_never_overdue() -> None:
    demo = after(rolling(Rollout(paused=True, progress_deadline=10)), [])
    assert not is_overdue(demo, load_state(demo.status), NOW + timedelta(days=1))


def test_a_rollout_has_its_whole_deadline_after_a_pause() -> None:
    going, halted = Rollout(progress_deadline=600), Rollout(paused=True, progress_deadline=600)
    demo = after(rolling(going, replicas=2), [group("a0"), group("a1")])
    demo = after(demo, [group("a0"), group("b1")], 100, newest="b")
    paused = after(replace(demo, rollout=halted), [group("a0"), group("b1")], 200, newest="b")
    later = after(paused, [group("a0"), group("b1")], 90_000, newest="b")
    assert later.status == paused.status, "nothing is written meanwhile"
    again = after(replace(later, rollout=going), [group("a0"), group("b1")], 90_000, newest="b")
    memory = load_state(again.status)
    assert seconds_to_deadline(again, memory, NOW + timedelta(seconds=90_000)) == 600
    assert is_overdue(again, memory, NOW + timedelta(seconds=90_600))


def test_a_rollout_up_to_its_partition_is_complete() -> None:
    demo = after(rolling(Rollout(partition=1, progress_deadline=10), replicas=2), [group("a0"), group("a1")])
    demo = after(demo, [group("a0"), group("b2")], newest="b")
    assert not is_overdue(demo, load_state(demo.status), NOW + timedelta(days=1))


def test_a_rollout_has_its_whole_deadline_when_the_partition_is_lowered() -> None:
    a, b, going = group("a0"), group("b1"), {"newest": "b"}
    demo = after(rolling(Rollout(partition=1, progress_deadline=600), replicas=2), [a, group("a1")])
    demo = after(demo, [a, b], 100, **going)
    assert seconds_to_deadline(demo, load_state(demo.status), NOW + timedelta(hours=2)) is None
    more = after(replace(demo, rollout=Rollout(progress_deadline=600)), [a, b], 7200, **going)
    assert seconds_to_deadline(more, load_state(more.status), NOW + timedelta(seconds=7200)) == 600


def test_a_retried_revision_has_its_whole_deadline() -> None:
    demo = rolling(lifecycle={"startupTimeoutSeconds": 60, "drainTimeoutSeconds": 6, "maxGroupRestarts": 2})
    demo = after(demo, [group("a0", restarts=3)], serves="")
    assert load_state(demo.status).abandoned is not None
    edited = after(
        replace(demo, spec={**demo.spec, "suspend": "x"}), [group("a0", restarts=3)], 7200, serves=""
    )
    assert seconds_to_deadline(edited, load_state(edited.status), NOW + timedelta(seconds=7200)) == 600


def test_repeated_scaling_does_not_hide_a_rollout_without_progress() -> None:
    old = [group("a0"), group("a1"), group("a2")]
    demo = after(rolling(Rollout(progress_deadline=600), replicas=2), old[:2])
    for minute in range(0, 60, 5):
        groups = 2 + minute // 5 % 2
        demo = after(replace(demo, replicas=groups), [*old[:groups], group("b9")], 60 * minute, "a", "b")
    assert is_overdue(demo, load_state(demo.status), NOW + timedelta(hours=1))


def test_an_abandoned_group_is_retried_for_each_group_that_is_no_longer_wanted() -> None:
    """Otherwise a required group would be missing forever, and a service at zero groups could never wake."""
    budget = {"startupTimeoutSeconds": 60, "drainTimeoutSeconds": 6, "maxGroupRestarts": 2}
    demo = after(rolling(replicas=4, lifecycle=budget), [group("a0"), group("a1"), *FAILING])
    assert load_state(demo.status).abandoned.groups == (2, 3)  # type: ignore[union-attr]
    three = after(replace(demo, replicas=3), [group("a0"), group("a1")], 10)
    memory = load_state(three.status)
    assert memory.abandoned is not None and memory.abandoned.groups == (2,)
    assert {failure.index for failure in memory.failures} == {2}
    again = after(replace(three, replicas=4), [group("a0"), group("a1")], 20)
    assert load_state(again.status).abandoned == replace(memory.abandoned, wanted_groups=4)
    for fewer in (0, 1):
        memory = load_state(after(replace(three, replicas=fewer), [group("a0")][:fewer], 20).status)
        assert (memory.abandoned, memory.failures) == (None, ())
    paused = after(replace(demo, rollout=Rollout(paused=True)), [group("a0"), group("a1")], 20)
    assert load_state(paused.status).abandoned is not None
    assert load_state(after(replace(paused, replicas=2), [group("a0")], 30).status).abandoned is None


def test_restarts_are_counted_once_and_forgotten_after_an_hour() -> None:
    demo = after(rolling(), [group("a0", restarts=2)])
    demo = after(demo, [group("a0", restarts=2)], 60)
    assert len(load_state(demo.status).failures) == 2
    missed = after(demo, [], 70)
    demo = after(missed, [group("a0", restarts=3)], 1800)
    assert len(load_state(demo.status).failures) == 3
    assert len(load_state(after(demo, [group("a0", restarts=3)], 3700).status).failures) == 1


def test_failures_with_times_in_the_future_are_forgotten_an_hour_after_they_were_read() -> None:
    fast = after(rolling(), [group("a0", restarts=2)], 1800)  # the clock of the last leader was ahead
    demo = after(fast, [group("a0", restarts=2)])
    memory = load_state(demo.status)
    assert {failure.time for failure in memory.failures} == {NOW} and len(memory.failures) == 2
    assert memory.progress is not None and memory.progress.time == NOW
    assert not load_state(after(demo, [group("a0", restarts=2)], 3700).status).failures


@pytest.mark.parametrize("ahead", [-480, 0, 1800], ids=["8 min behind", "equal", "30 min ahead"])
def test_a_failed_verification_counts_once_whatever_the_clock_of_the_api_server(ahead: int) -> None:
    created = (NOW - timedelta(seconds=ahead)).strftime("%Y-%m-%dT%H:%M:%SZ")
    failed = [replace(group("a0"), name="demo-a-0-0", created=created)]
    failures = add_failures((), failed, NOW)
    assert [failure.name for failure in failures] == ["demo-a-0-0"]
    assert add_failures(failures, failed, NOW + timedelta(seconds=5)) == failures


def test_a_group_over_its_restart_budget_is_abandoned_until_the_spec_changes() -> None:
    demo = rolling(lifecycle={"startupTimeoutSeconds": 60, "drainTimeoutSeconds": 6, "maxGroupRestarts": 2})
    demo = after(demo, [group("a0", restarts=2)])
    assert load_state(demo.status).abandoned is None
    demo = after(demo, [group("a0", restarts=3, message="out of memory")], 10)
    given_up = load_state(demo.status).abandoned
    assert given_up is not None and given_up.groups == (0,)
    assert "more than 2 times within an hour (out of memory)" in given_up.message
    scaled = replace(demo, replicas=5, spec={**demo.spec, "replicas": 5})
    assert load_state(after(scaled, [], 7200).status).abandoned == replace(given_up, wanted_groups=5)
    edited = replace(demo, spec={**demo.spec, "suspend": "x"})
    forgiven = load_state(after(edited, [group("a0", restarts=3)], 20).status)
    assert (forgiven.abandoned, forgiven.failures) == (None, ())
    assert load_state(after(demo, [], 20, newest="b").status).abandoned is None


def test_many_groups_that_fail_in_turn_are_all_abandoned_eventually() -> None:
    budget = {"startupTimeoutSeconds": 60, "drainTimeoutSeconds": 6, "maxGroupRestarts": 10}
    demo = rolling(replicas=9, lifecycle=budget)
    gone: tuple[int, ...] = ()
    for turn in range(1, 60):
        groups = [group(f"a{number}", restarts=turn) for number in range(9) if number not in gone]
        demo = after(demo, groups, turn)
        assert len(load_state(demo.status).failures) <= 64
        given_up = load_state(demo.status).abandoned
        gone = given_up.groups if given_up is not None else ()
    assert gone == tuple(range(9))


def test_without_a_restart_budget_no_group_is_abandoned() -> None:
    demo = rolling(lifecycle={"startupTimeoutSeconds": 60, "drainTimeoutSeconds": 6, "maxGroupRestarts": 0})
    assert load_state(after(demo, [group("a0", restarts=60)]).status).abandoned is None


@pytest.mark.parametrize(
    ("given", "groups", "surge", "unavailable"),
    [
        (Rollout(), 4, 1, 0),
        (Rollout("25%", "25%"), 4, 1, 1),
        (Rollout("25%", "25%"), 5, 2, 1),
        (Rollout("1%", "99%"), 1, 1, 0),
        (Rollout("0%", "10%"), 5, 0, 1),
        (Rollout(0, 3), 2, 0, 2),
    ],
)
def test_percentages_round_in_favour_of_availability(
    given: Rollout, groups: int, surge: int, unavailable: int
) -> None:
    assert (given.surge_groups(groups), given.unavailable_groups(groups)) == (surge, unavailable)


@pytest.mark.parametrize(
    ("inputs", "name", "expected"),
    [
        (
            replace(
                GOOD,
                service=rolling(Rollout(paused=True)),
                groups=[OLD],
                rollout=RolloutState("b"),
            ),
            "Ready",
            (False, "Paused"),
        ),
        (
            replace(GOOD, service=rolling(Rollout(paused=True)), rollout=RolloutState("a")),
            "Ready",
            (True, "AllGroupsServing"),
        ),
        (replace(GOOD, groups=[OLD], overdue=True), "Progressing", (False, "ProgressDeadlineExceeded")),
        (replace(GOOD, groups=[OLD], overdue=True), "Ready", (False, "ProgressDeadlineExceeded")),
        (replace(GOOD, groups=[OLD], overdue=True), "Available", (True, "Serving")),
        (
            replace(
                GOOD,
                service=rolling(Rollout(partition=1), replicas=2),
                groups=[OLD, SERVING],
                rollout=RolloutState("b"),
            ),
            "Ready",
            (True, "PartitionReached"),
        ),
        (
            replace(
                GOOD,
                service=rolling(Rollout(partition=1), replicas=2),
                groups=[SERVING],
                rollout=RolloutState("b"),
            ),
            "Progressing",
            (True, "StartingGroups"),
        ),
        (
            replace(
                GOOD,
                rollout=RolloutState("b", abandoned=Abandoned("a", "h", (0,), "Why", "because")),
            ),
            "Failed",
            (True, "Why"),
        ),
    ],
)
def test_conditions_of_a_rollout(inputs: Any, name: str, expected: tuple[bool, str]) -> None:
    assert {c.type: (c.status, c.reason) for c in every_condition(inputs)}[name] == expected
