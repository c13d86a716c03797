# SPDX-License-Identifier: Apache-2.0
"""Nodes on which engines lost their GPU twice within an hour are avoided, for a bounded time and number."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from mizzen_operator.api.types import InferenceService
from mizzen_operator.pods.group import Group
from mizzen_operator.rollout.actions import CreateGroup, DeleteGroup, RolloutTarget
from mizzen_operator.rollout.avoided_nodes import (
    MAX_NODES,
    PENDING_SECONDS,
    end_needless_waits,
    find_avoided_nodes,
    forget_losses_if_pending,
)
from mizzen_operator.rollout.planner import plan
from mizzen_operator.rollout.progress import update_state
from mizzen_operator.rollout.state import GroupFailure, RolloutState, load_state
from service_kit import group, rolling

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
PENDING = replace(
    group("a1"),
    containers_ready=False,
    was_routable=False,
    routable=False,
    unschedulable="0/1 nodes are available",
    avoided_nodes=("n1",),
    age=PENDING_SECONDS,
)


def losses(*nodes: str) -> list[GroupFailure]:
    """Return one loss of a device on each of the nodes, a minute apart; "" is a failure of another kind."""
    times = [NOW + timedelta(minutes=number) for number in range(len(nodes))]
    return [
        GroupFailure(0, f"demo-a-0-{number}", "a", time, node)
        for number, (time, node) in enumerate(zip(times, nodes, strict=True))
    ]


def lost(attempt: int, node: str = "n1") -> Group:
    """Return a group that has lost its device on a node."""
    before = replace(group("a0"), name=f"demo-a-0-{attempt}", uid=f"u{attempt}", attempt=attempt)
    return replace(before, ended=True, restarts=1, reason="DeviceLost", lost_device_node=node)


def after(service: InferenceService, groups: list[Group], minutes: float) -> InferenceService:
    """Return the service with the status that a reconcile of these groups writes."""
    state = update_state(service, "a", groups, frozenset(), NOW + timedelta(minutes=minutes))
    entries = [{"name": group.name, "restarts": group.restarts} for group in groups]
    return replace(service, status=json.loads(json.dumps({**state.as_status(), "groups": entries})))


def avoided(service: InferenceService) -> tuple[str, ...]:
    return find_avoided_nodes(load_state(service.status).failures)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([], ()),
        (["n1"], ()),
        (["n1", "n2"], ()),
        (["", ""], ()),
        (["n1", "", "n1"], ("n1",)),
        (["n2", "n1", "n1", "n2", "n2"], ("n1", "n2")),
        (["n1", "n2", "n3", "n4"] * 2, ("n2", "n3", "n4")),
        (["n4", "n3", "n2", "n1"] * 2, ("n1", "n2", "n3")),
    ],
)
def test_at_most_three_nodes_with_two_losses_each_are_avoided(
    nodes: list[str], expected: tuple[str, ...]
) -> None:
    assert find_avoided_nodes(losses(*nodes)) == expected
    assert len(expected) <= MAX_NODES


def test_a_node_is_avoided_after_its_second_loss_until_an_hour_has_passed() -> None:
    demo = after(rolling(), [lost(0)], 0)
    assert avoided(demo) == ()
    demo = after(demo, [lost(0)], 1)
    assert avoided(demo) == (), "a loss counts once"
    demo = after(demo, [lost(1)], 30)
    assert avoided(demo) == ("n1",)
    assert avoided(after(demo, [], 59)) == ("n1",)
    assert avoided(after(demo, [], 61)) == ()


def test_other_failures_and_losses_on_other_nodes_do_not_count() -> None:
    crashed = replace(lost(0), reason="Error", lost_device_node="")
    demo = after(rolling(), [crashed], 0)
    demo = after(demo, [lost(1)], 1)
    demo = after(demo, [lost(2, "n2")], 2)
    assert avoided(demo) == ()


def test_a_group_that_fits_nowhere_else_may_use_the_node_again() -> None:
    state = RolloutState(failures=tuple(losses("n1", "n1", "n2", "n2")))
    demo = replace(rolling(), status=json.loads(json.dumps(state.as_status())))
    early = replace(PENDING, age=PENDING_SECONDS - 1)
    assert avoided(after(demo, [early], 5)) == ("n1", "n2")
    demo = after(demo, [PENDING], 5)
    assert avoided(demo) == ("n2",)
    assert len(load_state(demo.status).failures) == 4, "the losses still count towards the restart budget"


@pytest.mark.parametrize(
    "other",
    [
        replace(PENDING, unschedulable="", node="n2"),
        replace(PENDING, avoided_nodes=()),
        replace(PENDING, terminating=True),
    ],
    ids=["scheduled", "avoids nothing", "terminating"],
)
def test_other_groups_do_not_make_an_avoided_node_usable(other: Group) -> None:
    failures = tuple(losses("n1", "n1"))
    assert forget_losses_if_pending(failures, [other]) == failures


def test_a_group_that_waits_for_no_reason_is_replaced() -> None:
    target = RolloutTarget("demo", 1, "a")
    waits = end_needless_waits([PENDING], ["n1"])
    assert waits == [PENDING] and plan(target, waits, frozenset()) == []
    deleted, created = plan(target, end_needless_waits([PENDING], []), frozenset())
    assert isinstance(deleted, DeleteGroup) and deleted.name == PENDING.name
    assert isinstance(created, CreateGroup) and created.revision == "a"
