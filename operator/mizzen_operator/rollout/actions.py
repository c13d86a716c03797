# SPDX-License-Identifier: Apache-2.0
"""The planner's input and output: the target of a rollout, and the actions that lead to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RolloutTarget:
    """Target of the planner: the state that the spec asks for, and what the rollout state adds to it.

    Attributes:
        service: name of the service.
        groups: number of groups; 0 while the service is suspended.
        revision: revision that the groups should run.
        stable_revision: the last revision that served with all its groups; empty if none did.
        can_restore: groups of the stable revision can be created, because a ControllerRevision records it.
        max_surge: number of groups that may exist beyond `groups`.
        max_unavailable: number of groups that may be missing; not 0 if `max_surge` is 0.
        partition: number of outdated groups to keep.
        paused: the rollout does not continue: it neither creates updated groups nor retires outdated ones.
        abandoned: indexes of updated groups that exceeded their restart budget.
        verification_id: identifier of the golden prompts of new groups; empty if they are not verified.
        verification_failed: a group failed verification before the revision had ever served.
        pause_on_failure: keep the groups of a revision that failed verification, instead of deleting them.
    """

    service: str
    groups: int
    revision: str
    stable_revision: str = ""
    can_restore: bool = False
    max_surge: int = 1
    max_unavailable: int = 0
    partition: int = 0
    paused: bool = False
    abandoned: frozenset[int] = frozenset()
    verification_id: str = ""
    verification_failed: bool = False
    pause_on_failure: bool = False

    @property
    def min_available(self) -> int:
        """Minimum number of groups that must serve at any time."""
        return max(0, self.groups - self.max_unavailable)


@dataclass(frozen=True, slots=True)
class CreateGroup:
    """Create a group, or the missing pods of a group.

    Attributes:
        name: name of the group's leading pod.
        index: index of the group within its revision.
        revision: revision that the group runs.
        attempt: number of this attempt to run a group with this index, counted from 0.
        reason: why the group or pods are created, for the log.
        ranks: ranks of the pods to create; all pods if empty.
    """

    name: str
    index: int
    revision: str
    attempt: int
    reason: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeleteGroup:
    """Delete the pods of a group; the group drains within their grace period.

    Attributes:
        name: name of the group's leading pod.
        uid: UID of that pod.
        reason: why the group is deleted, for the log.
        pods: names and UIDs of the pods to delete.
    """

    name: str
    uid: str
    reason: str
    pods: tuple[tuple[str, str], ...]


Action = CreateGroup | DeleteGroup


def drop_creations(actions: Sequence[Action], revision: str) -> list[Action]:
    """Return the actions of a plan, except creations of groups that run `revision`."""
    return [
        action for action in actions if not (isinstance(action, CreateGroup) and action.revision == revision)
    ]


def delete_mislabelled_pods(pods: Sequence[tuple[str, str]]) -> list[DeleteGroup]:
    """Return actions that delete engine pods whose labels no longer identify their group.

    Args:
        pods: names and UIDs of the pods.
    """
    return [DeleteGroup(name, uid, "Stray", ((name, uid),)) for name, uid in pods]
