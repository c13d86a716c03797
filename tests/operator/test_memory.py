"""What a status remembers of a rollout, budgets that follow from the spec, specs made of revisions."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from mizzen_operator.api.types import InferenceService, Prompt, Rollout, Verification
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.errors import Refused
from mizzen_operator.metrics import Metrics
from mizzen_operator.pods.group import Group
from mizzen_operator.resources.pod_disruption_budget import engine_disruption_budget, min_available
from mizzen_operator.resources.revision_hash import revision
from mizzen_operator.rollout.progress import update_state, is_overdue, seconds_to_deadline
from mizzen_operator.rollout.revisions import Revisions, controller_revision, restore_service
from mizzen_operator.rollout.state import Abandoned, RolloutState, load_state
from mizzen_operator.status.conditions import build_conditions as every_condition
from service_kit import GOOD, OLD, SERVING, SPEC, group, rolling, service

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
CONFIG = OperatorConfig(engine_image="engine:1")


FAILING = [group("a2", restarts=3), group("a3", restarts=3)]


def after(
    before: InferenceService, groups: list[Group], seconds: float = 0, serves: str = "ab", newest: str = "a"
) -> InferenceService:
    """The service with the status that a look at `groups` leaves."""
    serving = frozenset(one.uid for one in groups if one.revision in serves)
    memory = update_state(before, newest, groups, serving, NOW + timedelta(seconds=seconds))
    entries = [{"name": one.name, "restarts": one.restarts} for one in groups]
    return replace(before, status=json.loads(json.dumps({**memory.as_status(), "groups": entries})))


def test_the_newest_revision_is_current_once_it_alone_serves() -> None:
    one = after(rolling(replicas=2), [group("a0")])
    assert load_state(one.status).stable_revision == ""
    one = after(one, [group("a0"), group("a1")])
    assert load_state(one.status).stable_revision == "a"
    one = after(one, [group("a0"), group("a1"), group("b2")], newest="b")
    assert load_state(one.status).stable_revision == "a"
    one = after(one, [group("b1"), group("b2")], serves="a", newest="b")
    assert load_state(one.status).stable_revision == "a"
    assert load_state(after(one, [group("b1"), group("b2")], newest="b").status).stable_revision == "b"


def test_nothing_of_the_old_revision_is_left_at_zero() -> None:
    one = after(rolling(), [group("a0")])
    assert load_state(after(replace(one, replicas=0), [], newest="b").status).stable_revision == "b"
    paused = replace(one, replicas=0, rollout=Rollout(paused=True))
    assert load_state(after(paused, [], newest="b").status).stable_revision == "a"


@pytest.mark.parametrize(
    "given",
    [Rollout(partition=1), Rollout(verification=Verification((Prompt("2 + 2 =", "4", 16),), "Rollback", 30))],
    ids=["partition", "verification"],
)
def test_what_is_to_be_tried_is_not_proven_by_nothing_being_there(given: Rollout) -> None:
    """Else a lull that an autoscaler sleeps through ends a canary, and lets through what answers wrong."""
    one = after(rolling(given), [group("a0")])
    assert load_state(one.status).stable_revision == "a"
    assert load_state(after(replace(one, replicas=0), [], newest="b").status).stable_revision == "a"
    assert load_state(after(rolling(given, replicas=0), []).status).stable_revision == ""


def test_what_is_left_of_several_revisions_is_what_is_stable() -> None:
    one = after(rolling(replicas=3), [group(f"a{number}") for number in range(3)])
    half = [group("b0"), group("b1"), replace(group("b2"), containers_ready=False)]
    one = after(one, [group("a0"), *half[1:]], newest="b")
    assert load_state(one.status).stable_revision == "a"
    assert load_state(after(one, half, newest="b").status).stable_revision == "a", "to go back to, until it serves whole"
    assert load_state(after(one, [group("a0"), *half[1:]], newest="c").status).stable_revision == "a"
    assert load_state(after(one, half, newest="c").status).stable_revision == "b"


def test_a_lost_status_takes_what_serves_for_the_current_revision() -> None:
    one = after(rolling(replicas=3), [group("b0"), group("a1"), group("b2"), group("c3")], newest="a")
    assert load_state(one.status).stable_revision == "b"


def test_the_deadline_begins_anew_with_each_step_and_not_with_what_goes_back() -> None:
    one = after(rolling(replicas=2), [])
    assert seconds_to_deadline(one, load_state(one.status), NOW) == 600
    one = after(one, [group("a0")], 100)
    one = after(one, [group("a0")], 200, serves="")
    one = after(one, [group("a0")], 300)
    memory = load_state(one.status)
    assert seconds_to_deadline(one, memory, NOW + timedelta(seconds=300)) == 400
    assert not is_overdue(one, memory, NOW + timedelta(seconds=699))
    assert is_overdue(one, memory, NOW + timedelta(seconds=700))
    one = after(one, [group("a0"), group("a1")], 800)
    assert seconds_to_deadline(one, load_state(one.status), NOW + timedelta(days=9)) is None
    up = after(replace(one, replicas=3), [group("a0"), group("a1")], 900)
    assert seconds_to_deadline(up, load_state(up.status), NOW + timedelta(seconds=900)) == 600


def test_a_paused_rollout_is_never_overdue() -> None:
    one = after(rolling(Rollout(paused=True, progress_deadline=10)), [])
    assert not is_overdue(one, load_state(one.status), NOW + timedelta(days=1))


def test_a_pause_costs_a_rollout_no_time() -> None:
    going, halted = Rollout(progress_deadline=600), Rollout(paused=True, progress_deadline=600)
    one = after(rolling(going, replicas=2), [group("a0"), group("a1")])
    one = after(one, [group("a0"), group("b1")], 100, newest="b")
    paused = after(replace(one, rollout=halted), [group("a0"), group("b1")], 200, newest="b")
    later = after(paused, [group("a0"), group("b1")], 90_000, newest="b")
    assert later.status == paused.status, "nothing is written meanwhile"
    again = after(replace(later, rollout=going), [group("a0"), group("b1")], 90_000, newest="b")
    memory = load_state(again.status)
    assert seconds_to_deadline(again, memory, NOW + timedelta(seconds=90_000)) == 600
    assert is_overdue(again, memory, NOW + timedelta(seconds=90_600))


def test_a_rollout_up_to_its_partition_is_done() -> None:
    one = after(rolling(Rollout(partition=1, progress_deadline=10), replicas=2), [group("a0"), group("a1")])
    one = after(one, [group("a0"), group("b2")], newest="b")
    assert not is_overdue(one, load_state(one.status), NOW + timedelta(days=1))


def test_a_rollout_that_rests_has_its_whole_time_when_it_goes_on() -> None:
    a, b, going = group("a0"), group("b1"), {"newest": "b"}
    one = after(rolling(Rollout(partition=1, progress_deadline=600), replicas=2), [a, group("a1")])
    one = after(one, [a, b], 100, **going)
    assert seconds_to_deadline(one, load_state(one.status), NOW + timedelta(hours=2)) is None
    more = after(replace(one, rollout=Rollout(progress_deadline=600)), [a, b], 7200, **going)
    assert seconds_to_deadline(more, load_state(more.status), NOW + timedelta(seconds=7200)) == 600


def test_what_was_given_up_has_its_whole_time_when_it_is_tried_again() -> None:
    one = rolling(lifecycle={"startupTimeoutSeconds": 60, "drainTimeoutSeconds": 6, "maxGroupRestarts": 2})
    one = after(one, [group("a0", restarts=3)], serves="")
    assert load_state(one.status).abandoned is not None
    edited = after(
        replace(one, spec={**one.spec, "suspend": "x"}), [group("a0", restarts=3)], 7200, serves=""
    )
    assert seconds_to_deadline(edited, load_state(edited.status), NOW + timedelta(seconds=7200)) == 600


def test_who_scales_again_and_again_hides_no_rollout_that_gets_nowhere() -> None:
    old = [group("a0"), group("a1"), group("a2")]
    one = after(rolling(Rollout(progress_deadline=600), replicas=2), old[:2])
    for minute in range(0, 60, 5):
        groups = 2 + minute // 5 % 2
        one = after(replace(one, replicas=groups), [*old[:groups], group("b9")], 60 * minute, "a", "b")
    assert is_overdue(one, load_state(one.status), NOW + timedelta(hours=1))


def test_a_group_that_was_given_up_is_forgotten_with_one_that_is_wanted_no_more() -> None:
    """What is wanted would else lack it for ever, and a service that slept never wake."""
    budget = {"startupTimeoutSeconds": 60, "drainTimeoutSeconds": 6, "maxGroupRestarts": 2}
    one = after(rolling(replicas=4, lifecycle=budget), [group("a0"), group("a1"), *FAILING])
    assert load_state(one.status).abandoned.groups == (2, 3)  # type: ignore[union-attr]
    three = after(replace(one, replicas=3), [group("a0"), group("a1")], 10)
    memory = load_state(three.status)
    assert memory.abandoned is not None and memory.abandoned.groups == (2,)
    assert {failure.index for failure in memory.failures} == {2}
    again = after(replace(three, replicas=4), [group("a0"), group("a1")], 20)
    assert load_state(again.status).abandoned == replace(memory.abandoned, wanted_groups=4)
    for fewer in (0, 1):
        memory = load_state(after(replace(three, replicas=fewer), [group("a0")][:fewer], 20).status)
        assert (memory.abandoned, memory.failures) == (None, ())
    paused = after(replace(one, rollout=Rollout(paused=True)), [group("a0"), group("a1")], 20)
    assert load_state(paused.status).abandoned is not None
    assert load_state(after(replace(paused, replicas=2), [group("a0")], 30).status).abandoned is None


def test_restarts_are_counted_once_and_forgotten_after_an_hour() -> None:
    one = after(rolling(), [group("a0", restarts=2)])
    one = after(one, [group("a0", restarts=2)], 60)
    assert len(load_state(one.status).failures) == 2
    missed = after(one, [], 70)
    one = after(missed, [group("a0", restarts=3)], 1800)
    assert len(load_state(one.status).failures) == 3
    assert len(load_state(after(one, [group("a0", restarts=3)], 3700).status).failures) == 1


def test_a_group_over_its_budget_is_given_up_until_the_spec_changes() -> None:
    one = rolling(lifecycle={"startupTimeoutSeconds": 60, "drainTimeoutSeconds": 6, "maxGroupRestarts": 2})
    one = after(one, [group("a0", restarts=2)])
    assert load_state(one.status).abandoned is None
    one = after(one, [group("a0", restarts=3, message="out of memory")], 10)
    given_up = load_state(one.status).abandoned
    assert given_up is not None and given_up.groups == (0,)
    assert "more than 2 times within an hour (out of memory)" in given_up.message
    scaled = replace(one, replicas=5, spec={**one.spec, "replicas": 5})
    assert load_state(after(scaled, [], 7200).status).abandoned == replace(given_up, wanted_groups=5)
    edited = replace(one, spec={**one.spec, "suspend": "x"})
    forgiven = load_state(after(edited, [group("a0", restarts=3)], 20).status)
    assert (forgiven.abandoned, forgiven.failures) == (None, ())
    assert load_state(after(one, [], 20, newest="b").status).abandoned is None


def test_many_groups_that_fail_by_turns_are_all_given_up_in_the_end() -> None:
    budget = {"startupTimeoutSeconds": 60, "drainTimeoutSeconds": 6, "maxGroupRestarts": 10}
    one = rolling(replicas=9, lifecycle=budget)
    gone: tuple[int, ...] = ()
    for turn in range(1, 60):
        there = [group(f"a{number}", restarts=turn) for number in range(9) if number not in gone]
        one = after(one, there, turn)
        assert len(load_state(one.status).failures) <= 64
        given_up = load_state(one.status).abandoned
        gone = given_up.groups if given_up is not None else ()
    assert gone == tuple(range(9))


def test_no_limit_gives_nothing_up() -> None:
    one = rolling(lifecycle={"startupTimeoutSeconds": 60, "drainTimeoutSeconds": 6, "maxGroupRestarts": 0})
    assert load_state(after(one, [group("a0", restarts=60)]).status).abandoned is None


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
def test_shares_round_for_the_better(given: Rollout, groups: int, surge: int, unavailable: int) -> None:
    assert (given.surge_groups(groups), given.unavailable_groups(groups)) == (surge, unavailable)


@pytest.mark.parametrize(
    ("pods", "unavailable", "left"), [(0, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 1), (5, 0, 4), (5, 2, 3)]
)
def test_an_eviction_leaves_enough(pods: int, unavailable: int, left: int) -> None:
    assert min_available(pods, unavailable) == left


def test_a_suspended_service_guards_nothing() -> None:
    assert engine_disruption_budget(rolling(replicas=3))["spec"]["minAvailable"] == 2
    assert engine_disruption_budget(rolling(replicas=3, suspend=True))["spec"]["minAvailable"] == 0


def test_a_service_is_made_again_of_its_revision() -> None:
    template = {"labels": {"team": "a"}, "affinity": {"nodeAffinity": {}}}
    old = service(podTemplate=template, parallelism={"tensor": 2})
    data = controller_revision(old, CONFIG, revision(old, CONFIG), 1)["data"]
    new = service(
        podTemplate={"labels": {}},
        model={**SPEC["model"], "source": "file:///new", "contextLength": 5, "aliases": ["x"]},
        engine={**SPEC["engine"], "image": "engine:9", "pageSize": 64},
        replicas=7,
    )
    again = restore_service(new, json.loads(json.dumps(data)))
    assert revision(again, OperatorConfig(engine_image="engine:2")) == revision(old, CONFIG)
    assert (again.model.source, again.model.context_length, again.tensor) == ("file:///m", None, 2)
    assert again.pod_template == template
    assert again.engine.image == "engine:1"
    assert (again.replicas, again.model.aliases) == (7, ("x",)), "what reaches no engine is as it is now"


@pytest.mark.parametrize(
    ("facts", "name", "expected"),
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
def test_conditions_of_a_rollout(facts: Any, name: str, expected: tuple[bool, str]) -> None:
    assert {c.type: (c.status, c.reason) for c in every_condition(facts)}[name] == expected


class FakeKube:
    """Keeps ControllerRevisions, and counts what is asked of it."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []

    async def create(self, body: dict[str, Any]) -> bool:
        self.calls.append("create")
        name = body["metadata"]["name"]
        if name in self.objects:
            return False
        self.objects[name] = msgspec.json.decode(msgspec.json.encode(body))
        self.objects[name]["metadata"]["uid"] = f"uid-{name}"
        return True

    async def list(self, ref: Any, selector: str) -> list[dict[str, Any]]:
        self.calls.append("list")
        return list(self.objects.values())

    async def get(self, ref: Any) -> dict[str, Any] | None:
        return self.objects.get(ref.name)

    async def patch(self, ref: Any, patch: dict[str, Any]) -> None:
        self.calls.append("patch")
        self.objects[ref.name].update(patch)

    async def delete(self, ref: Any, uid: str) -> bool:
        self.calls.append("delete")
        assert self.objects[ref.name]["metadata"]["uid"] == uid
        del self.objects[ref.name]
        return True


async def test_revisions_are_recorded_once_and_the_oldest_are_left_out() -> None:
    kube = FakeKube()
    revisions = Revisions(kube, CONFIG, Metrics())  # type: ignore[arg-type]
    one = replace(rolling(), history_limit=1)
    assert await revisions.sync(one, "a", ()) == {"a"}
    assert await revisions.sync(one, "a", ()) == {"a"}
    assert kube.calls == ["create"], "a new service costs one request, and then none"
    one = replace(one, status={"updateRevision": "a"})
    for newest, used in (("b", {"a"}), ("c", {"b"}), ("d", {"c"})):
        recorded = await revisions.sync(one, newest, used)
    assert recorded == {"b", "c", "d"}
    assert await revisions.sync(one, "b", {"d"}) == {"b", "c", "d"}
    assert {name: body["revision"] for name, body in kube.objects.items()} == {
        "demo-b": 5,
        "demo-c": 3,
        "demo-d": 4,
    }
    calls = len(kube.calls)
    after_restart = Revisions(kube, CONFIG, Metrics())  # type: ignore[arg-type]
    assert await after_restart.sync(one, "b", {"d"}) == {"b", "c", "d"}
    assert kube.calls[calls:] == ["list"]


async def test_what_an_earlier_release_wrote_out_of_order_is_written_anew_once() -> None:
    kube, one = FakeKube(), replace(rolling(), status={"updateRevision": "b"})
    revisions = Revisions(kube, CONFIG, Metrics())  # type: ignore[arg-type]
    for newest in ("a", "b"):
        await revisions.sync(one, newest, {"a"})
    before = json.dumps(kube.objects, sort_keys=True)
    for body in kube.objects.values():
        body["data"] = {"spec": body["data"]["spec"], "image": body["data"]["image"]}
        body["metadata"]["resourceVersion"] = "7"
    del kube.calls[:]
    for _ in range(2):
        after_upgrade = Revisions(kube, CONFIG, Metrics())  # type: ignore[arg-type]
        assert await after_upgrade.sync(one, "b", {"a"}) == {"a", "b"}
    assert kube.calls == ["list", "delete", "create", "delete", "create", "list", "list"]
    assert json.dumps(kube.objects, sort_keys=True) == before
    assert all(list(body["data"]) == ["image", "spec"] for body in kube.objects.values())


async def test_what_cannot_be_made_again_is_said_once_and_then_done_without() -> None:
    kube = FakeKube()
    revisions = Revisions(kube, CONFIG, Metrics())  # type: ignore[arg-type]
    one = replace(rolling(), status={"updateRevision": "a"})
    await revisions.sync(one, "a", ())
    await revisions.sync(one, "b", {"a"})
    del kube.objects["demo-a"]["data"]["spec"]["engine"]["device"], kube.objects["demo-a"]["data"]["image"]
    with pytest.raises(Refused, match="revision a cannot be created again"):
        await revisions.restore(one, "a")
    assert await revisions.sync(one, "b", {"a"}) == {"b"}
    del kube.objects["demo-a"]
    with pytest.raises(Refused, match="revision a is gone"):
        await revisions.restore(one, "a")


async def test_a_name_that_is_taken_is_no_revision_of_ours() -> None:
    kube = FakeKube()
    other = replace(rolling(), uid="other")
    await Revisions(kube, CONFIG, Metrics()).sync(other, "a", ())  # type: ignore[arg-type]
    with pytest.raises(Refused, match="belongs to something else"):
        await Revisions(kube, CONFIG, Metrics()).sync(rolling(), "a", ())  # type: ignore[arg-type]


def test_an_upgrade_replaces_no_group() -> None:
    """Fields that a release adds must not change the name of a revision by coming with their defaults."""
    template = {"labels": {}, "sharedMemorySizeLimit": "8Gi"}
    spread = {"podDisruptionBudget": "Auto", "spreadTopologyKey": "kubernetes.io/hostname"}
    first = service(podTemplate=template, availability=spread)
    assert revision(first, OperatorConfig(engine_image="e:1")) == "af503b36", "as the first release named it"
    for part, change in (
        ("engine", {**SPEC["engine"], "kvCacheDtype": "FP8"}),
        ("availability", {**spread, "spreadTopologyKey": "zone"}),
    ):
        other = service(**{"podTemplate": template, "availability": spread, part: change})
        assert revision(other, OperatorConfig(engine_image="e:1")) != "af503b36"
