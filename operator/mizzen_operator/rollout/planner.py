# SPDX-License-Identifier: Apache-2.0
"""Plans the next actions for the groups of a service. Pure.

The reconciler calls `plan` after every change. `plan` keeps no state between calls, so it needs no special
case for a rollout that is reverted, for a change of `replicas` during a rollout, or for the loss of a pod.

*Updated* groups run the target revision, *outdated* groups any other. The *stable* revision is the last one
that served with all its groups. A group *serves* while there are ready gateways and all of them route to it;
a group awaiting verification never serves. A terminating group is ignored: its replacement does not wait
until it has ended. `min_available` is the number of groups that must serve, `groups - max_unavailable`.

`_choose_counts` first determines how many updated groups there should be, and how many outdated groups to
keep. Then these rules apply, in this order:

1. *Ended*: delete a group that will not run again. If it ended without having served, it *backs off* first:
   its replacement is not created for a while, because a group that ends at once would otherwise be created
   again without pause. A multi-pod group ends when one of its pods ends, is deleted or is missing.
2. *Failed verification*: delete an updated group that answered its golden prompts wrong, and create it again
   if the revision has served before. If it has not, the revision itself has failed: delete its other groups
   too, and keep or restore the outdated ones. With `pause_on_failure`, keep the failed groups instead.
3. *Abandoned*: delete an updated group that exceeded its restart budget, as soon as it is not ready, and do
   not use its index again.
4. *Superseded*: delete an outdated group that has never served, because that loses no capacity, unless it is
   a group of the stable revision that is to be kept.
5. *Surplus*: if there are more updated groups than there should be, retire the worst. While outdated groups
   are to be kept, retire an updated group that has served only if enough other groups serve.
6. *Restored*: create groups of the stable revision if fewer outdated groups are left than are to be kept.
   After a revert the stable revision is the target itself, and this rule does not apply: its groups that were
   abandoned or failed verification are not created again.
7. *Missing*: create the updated groups that are missing. Rules 6 and 7 never raise the number of groups above
   `groups + max_surge`.
8. *Replaced*: retire outdated groups that have served, beyond those to keep, while `min_available` other
   groups serve. For a group whose engine is not ready, or to which no answering gateway routes, it is enough
   that `min_available` other groups serve or have served: its deletion loses no capacity, and otherwise a
   rollout that repairs a broken revision would wait forever. A group with a *protocol mismatch* may always be
   retired, and does not count as one that has served: its engine speaks another protocol than every gateway,
   so it can never serve again. After an upgrade that changed the protocol, this applies to every outdated
   group: all of them may be retired once the first updated group serves.

A multi-pod group whose creation was interrupted gets its missing pods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mizzen_operator.api import child_names
from mizzen_operator.pods.group import Group
from mizzen_operator.rollout.actions import Action, CreateGroup, DeleteGroup, RolloutTarget


def plan(
    target: RolloutTarget,
    groups: Sequence[Group],
    serving: frozenset[str],
    taken_names: frozenset[str] = frozenset(),
) -> list[Action]:
    """Return the actions to take now, in the order in which to take them.

    Args:
        target: desired state of the rollout.
        groups: all groups of the service, including terminating ones, in any order.
        serving: UIDs of the leading pods that every ready gateway routes to.
        taken_names: pod names that a new pod cannot use.
    """
    sets = _build_group_sets(target, groups, serving)
    surplus = _choose_surplus(target, sets)
    return [
        *_delete_ended(sets),
        *_delete_failed(sets),
        *_delete_abandoned(sets),
        *_delete_superseded(sets),
        *_delete(surplus, "Surplus"),
        *_create_groups(target, sets, surplus, taken_names),
        *_delete_replaced(target, sets, surplus),
    ]


@dataclass(frozen=True, slots=True)
class GroupSets:
    """The groups of a service, sorted into the sets to which the rules apply.

    Attributes:
        groups: all groups, sorted by name.
        live: groups that are neither terminating, ended nor incomplete.
        serving: UIDs of live groups that serve.
        updated: live groups of the target revision, except `failed` and `abandoned` ones.
        failed: live groups of the target revision that are to be deleted because verification failed.
        abandoned: live groups of the target revision that exceeded their restart budget and are not ready.
        updated_count: number of updated groups that there should be.
        keep_old: number of outdated groups to keep.
        ever_served: live outdated groups that serve or have served.
        restored_pending: live stable groups that have never served, but are kept to reach `keep_old`.
        superseded: all other live outdated groups that have never served.
        may_serve: groups among `updated` and `ever_served` that serve, or have served and may serve again.
        updated_backing_off: ended groups of the target revision whose replacements have to wait.
        stable_backing_off: ended groups of the stable revision whose replacements have to wait.
    """

    groups: Sequence[Group]
    live: Sequence[Group]
    serving: frozenset[str]
    updated: Sequence[Group]
    failed: Sequence[Group]
    abandoned: Sequence[Group]
    updated_count: int
    keep_old: int
    ever_served: Sequence[Group]
    restored_pending: Sequence[Group]
    superseded: Sequence[Group]
    may_serve: Sequence[Group]
    updated_backing_off: Sequence[Group]
    stable_backing_off: Sequence[Group]

    @property
    def backing_off(self) -> Sequence[Group]:
        """Ended groups whose replacements have to wait."""
        return [*self.updated_backing_off, *self.stable_backing_off]


def _build_group_sets(
    target: RolloutTarget, groups: Sequence[Group], routed_by_all: frozenset[str]
) -> GroupSets:
    """Sort groups into sets; `routed_by_all`: UIDs of the leading pods that every ready gateway routes to."""
    groups = sorted(groups, key=lambda group: group.name)
    live = [group for group in groups if group.live]
    serving = frozenset(
        group.uid
        for group in live
        if group.uid in routed_by_all and group.containers_ready and not group.awaiting_verification
    )
    of_target = [group for group in live if group.revision == target.revision]
    abandoned = [g for g in of_target if g.index in target.abandoned and not g.containers_ready]
    failed = [group for group in of_target if _has_failed(target, group)]
    updated = [group for group in of_target if group not in abandoned and group not in failed]
    outdated = [group for group in live if group.revision != target.revision]
    ever_served = [group for group in outdated if _has_served(group, serving)]
    updated_count, keep_old = _choose_counts(target, outdated, updated, serving)
    pending = [
        group
        for group in outdated
        if group not in ever_served
        and group.revision == target.stable_revision
        and not group.awaiting_verification
    ]
    lacking = keep_old - len(ever_served)
    restored_pending = _worst_first(pending, serving)[::-1][: max(0, lacking)]
    return GroupSets(
        groups=groups,
        live=live,
        serving=serving,
        updated=updated,
        failed=failed,
        abandoned=abandoned,
        updated_count=updated_count,
        keep_old=keep_old,
        ever_served=ever_served,
        restored_pending=restored_pending,
        superseded=[
            group for group in outdated if group not in ever_served and group not in restored_pending
        ],
        may_serve=[
            group
            for group in (*updated, *outdated)
            if _has_served(group, serving) and not _is_mismatched(group, serving)
        ],
        updated_backing_off=_backing_off(groups, target.revision, updated_count - len(updated)),
        stable_backing_off=_backing_off(groups, target.stable_revision, lacking - len(restored_pending)),
    )


def _choose_counts(
    target: RolloutTarget, outdated: Sequence[Group], updated: Sequence[Group], serving: frozenset[str]
) -> tuple[int, int]:
    """Return the number of updated groups that there should be, and the number of outdated groups to keep."""
    has_stable = target.stable_revision not in ("", target.revision)
    if target.verification_failed:
        return _choose_counts_after_failure(target, has_stable or bool(outdated), updated)
    # An abandoned index is not used again, but an existing group of the index is not deleted because of this.
    unusable = target.abandoned - {group.index for group in updated}
    usable = min(target.groups, max(target.groups - len(unusable), len(updated)))
    # Case 1: no group is outdated. Without an earlier revision, partition and pause do not apply.
    if not (has_stable or outdated):
        return usable, 0
    proven = any(_has_served(group, serving) for group in updated)
    partition = min(target.partition, target.groups) if has_stable else 0
    count = min(usable, target.groups - partition)
    # Case 2: the rollout must not continue: it is paused, or groups were abandoned before any of them served.
    if (target.paused and has_stable) or (target.abandoned and not proven):
        count = min(count, len(updated))
        return count, target.groups - count
    # Case 3: the revision has not served yet, so outdated groups must provide `min_available`.
    if not proven and has_stable:
        return count, max(partition, target.min_available)
    # Case 4: the revision has served, and replaces all groups outside the partition.
    return count, partition


def _choose_counts_after_failure(
    target: RolloutTarget, has_other_revision: bool, updated: Sequence[Group]
) -> tuple[int, int]:
    """Return the two numbers of `_choose_counts` for a target revision that failed verification.

    Args:
        target: desired state of the rollout.
        has_other_revision: another revision has groups that can be kept or restored.
        updated: updated groups that stay; without `pause_on_failure`, only groups that have served.
    """
    if target.pause_on_failure:
        return len(updated), target.groups if has_other_revision else 0
    return (0, target.groups) if has_other_revision else (min(len(updated), target.groups), 0)


def _has_failed(target: RolloutTarget, group: Group) -> bool:
    """Return whether to delete a live group of the target revision because verification failed."""
    if target.verification_failed:
        return not (target.pause_on_failure or group.was_routable)
    return (
        group.awaiting_verification
        and bool(target.verification_id)
        and group.failed_verification == target.verification_id
    )


def _backing_off(groups: Sequence[Group], revision: str, places: int) -> list[Group]:
    """Return at most `places` of a revision's ended groups that back off, the latest attempts first."""
    ended = [
        group
        for group in groups
        if group.revision == revision and group.backing_off and not (group.terminating or group.incomplete)
    ]
    return sorted(ended, key=lambda group: -group.attempt)[: max(0, places)]


def _delete_ended(sets: GroupSets) -> list[DeleteGroup]:
    """Apply rule 1: delete the remaining pods of groups that will not run again, unless they back off."""
    ended = [group for group in sets.groups if not group.live and group not in sets.backing_off]
    return _delete([group for group in ended if group.remaining_pods], "Ended")


def _delete_failed(sets: GroupSets) -> list[DeleteGroup]:
    """Apply rule 2: delete updated groups that failed verification."""
    return _delete(sets.failed, "Refused")


def _delete_abandoned(sets: GroupSets) -> list[DeleteGroup]:
    """Apply rule 3: delete updated groups that exceeded their restart budget."""
    return _delete([group for group in sets.abandoned if group not in sets.failed], "GivenUp")


def _delete_superseded(sets: GroupSets) -> list[DeleteGroup]:
    """Apply rule 4: delete outdated groups that never served."""
    return _delete(sets.superseded, "Superseded")


def _choose_surplus(target: RolloutTarget, sets: GroupSets) -> list[Group]:
    """Apply rule 5: choose the updated groups to retire because there are too many."""
    worst = _worst_first(sets.updated, sets.serving)[: max(0, len(sets.updated) - sets.updated_count)]
    if not sets.keep_old:
        return worst
    have_served = [group for group in worst if _has_served(group, sets.serving)]
    never_served = [group for group in worst if group not in have_served]
    return [*never_served, *_retire(have_served, len(have_served), sets.serving, sets.may_serve, target)]


def _create_groups(
    target: RolloutTarget, sets: GroupSets, surplus: Sequence[Group], taken_names: frozenset[str]
) -> list[CreateGroup]:
    """Apply rules 6 and 7: create missing groups, and the missing pods of incomplete ones.

    Updated groups come last, because a quota may leave room for only the first creations.
    """
    leaving = (*sets.failed, *sets.abandoned, *sets.superseded, *surplus)
    staying = [group for group in sets.live if group not in leaving]
    room = target.groups + target.max_surge - len(staying) - len(sets.backing_off)
    restored = _count_restored(target, sets)
    missing = min(_count_missing(target, sets, staying), room - restored)
    created = [_complete(group) for group in staying if group.missing_ranks]
    used = {group.index for group in (*staying, *sets.backing_off)}
    for revision in [target.stable_revision] * min(restored, room) + [target.revision] * missing:
        index = _free_index(target, revision, used)
        used.add(index)
        created.append(_create(target, revision, index, sets.groups, taken_names))
    return sorted(created, key=lambda group: group.revision == target.revision)


def _count_restored(target: RolloutTarget, sets: GroupSets) -> int:
    """Apply rule 6: return the number of groups of the stable revision to create."""
    if not target.can_restore or target.stable_revision == target.revision:
        return 0
    kept = len(sets.ever_served) + len(sets.restored_pending) + len(sets.stable_backing_off)
    return max(0, sets.keep_old - kept)


def _count_missing(target: RolloutTarget, sets: GroupSets, staying: Sequence[Group]) -> int:
    """Apply rule 7: return the number of updated groups that are missing."""
    present = sum(group.revision == target.revision for group in staying)
    return sets.updated_count - present - len(sets.updated_backing_off)


def _delete_replaced(target: RolloutTarget, sets: GroupSets, surplus: Sequence[Group]) -> list[DeleteGroup]:
    """Apply rule 8: retire outdated groups beyond those to keep; groups of the stable revision go last."""
    other = [group for group in sets.ever_served if group.revision != target.stable_revision]
    stable = [group for group in sets.ever_served if group.revision == target.stable_revision]
    candidates = [*_worst_first(other, sets.serving), *_worst_first(stable, sets.serving)]
    serving = sets.serving - {group.uid for group in surplus}
    may_serve = [group for group in sets.may_serve if group not in surplus]
    retired = _retire(candidates, len(candidates) - sets.keep_old, serving, may_serve, target)
    return _delete(retired, "Replaced")


def _retire(
    candidates: Sequence[Group],
    limit: int,
    serving: frozenset[str],
    may_serve: Sequence[Group],
    target: RolloutTarget,
) -> list[Group]:
    """Return at most `limit` of the candidates that may be retired now.

    A group may be retired while at least `min_available` other groups serve. A group with a protocol mismatch
    may always be retired: every gateway has reported that it can never route to the group. A group that does
    not serve may also be retired while more than `min_available` groups serve or have served, unless it is
    ready and its gate `mizzen.dev/routable` is True: then perhaps no gateway answers at the moment.
    """
    retired: list[Group] = []
    serving_count, may_serve_count = len(serving), len(may_serve)
    for group in candidates:
        serving_after = serving_count - (group.uid in serving)
        mismatched = _is_mismatched(group, serving)
        broken = group.uid not in serving and not (group.containers_ready and group.routable)
        enough = serving_after >= target.min_available
        may_go = enough or (broken and may_serve_count > target.min_available) or mismatched
        if len(retired) < limit and may_go:
            retired.append(group)
            serving_count, may_serve_count = serving_after, may_serve_count - (not mismatched)
    return retired


def _has_served(group: Group, serving: frozenset[str]) -> bool:
    return group.was_routable or group.uid in serving


def _is_mismatched(group: Group, serving: frozenset[str]) -> bool:
    return group.protocol_mismatch and group.uid not in serving


def _worst_first(groups: Sequence[Group], serving: frozenset[str]) -> list[Group]:
    """Sort groups, the least useful first; among equals, the highest index and attempt come first."""
    return sorted(
        groups,
        key=lambda group: (
            group.uid in serving,
            not _is_mismatched(group, serving),
            not group.failing,
            group.containers_ready,
            group.was_routable,
            -group.index,
            -group.attempt,
        ),
    )


def _delete(groups: Sequence[Group], reason: str) -> list[DeleteGroup]:
    return [DeleteGroup(group.name, group.uid, reason, group.remaining_pods) for group in groups]


def _complete(group: Group) -> CreateGroup:
    """Return the action that creates the missing pods of a group whose creation was interrupted."""
    return CreateGroup(
        group.name, group.index, group.revision, group.attempt, "Incomplete", ranks=group.missing_ranks
    )


def _free_index(target: RolloutTarget, revision: str, used: set[int]) -> int:
    """Return the lowest index that a new group of a revision may use."""
    index = 0
    while index in used or (revision == target.revision and index in target.abandoned):
        index += 1
    return index


def _create(
    target: RolloutTarget, revision: str, index: int, groups: Sequence[Group], taken_names: frozenset[str]
) -> CreateGroup:
    """Return the action that creates a group with this revision and index, with a new attempt number."""
    seen = [group.attempt for group in groups if (group.revision, group.index) == (revision, index)]
    attempt = max(seen, default=-1) + 1
    while _is_taken(name := child_names.leader_pod(target.service, revision, index, attempt), taken_names):
        attempt += 1
    reason = "Replaces" if seen else "Restored" if revision != target.revision else "Missing"
    return CreateGroup(name, index, revision, attempt, reason)


def _is_taken(name: str, taken_names: frozenset[str]) -> bool:
    """Return whether any pod name of a group is taken; `name` is the name of the group's leading pod."""
    return name in taken_names or any(other.startswith(f"{name}-") for other in taken_names)
