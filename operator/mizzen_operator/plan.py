"""What to do next for the groups of a service: pure arithmetic over what is there.

`plan` is level-triggered: it is called again after every change and knows nothing of earlier calls. So a
revert in the middle of a rollout, a change of `replicas` during one, and a pod that dies during either are no
cases of their own. The rules, in the order in which they apply:

1. *ended*: a pod that will not run again is deleted. One that ended before it served *rests* for a while
   first, in the place of its replacement: what ends at once would otherwise be made again without pause.
2. *superseded*: a group of an old revision that never served is deleted, for nothing is lost with it.
3. *surplus*: more groups of the wanted revision than wanted: the worst ones are retired.
4. *missing*: groups of the wanted revision are made, up to `groups + MAX_SURGE` in all.
5. *replaced*: a group of an old revision that serves, or did, is retired when enough others serve.

Serving means that every ready gateway, and at least one, routes to the group now. A terminating pod counts
for nothing: its replacement does not wait for its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mizzen_operator import labels
from mizzen_operator.observe import Group

MAX_SURGE = 1
MAX_UNAVAILABLE = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the spec asks for.

    Attributes:
        groups: number of groups; 0 while the service is suspended.
        revision: what they should run.
    """

    service: str
    groups: int
    revision: str


@dataclass(frozen=True, slots=True)
class CreateGroup:
    """Make a group's pod."""

    name: str
    group: int
    revision: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeleteGroup:
    """Delete a group's pod; it drains within its grace period."""

    name: str
    uid: str
    reason: str


Action = CreateGroup | DeleteGroup


def plan(
    wanted: Wanted,
    groups: Sequence[Group],
    serving: frozenset[str],
    taken: frozenset[str] = frozenset(),
) -> list[Action]:
    """Say what to do now.

    Args:
        wanted: what the spec asks for.
        groups: the service's pods, terminating ones too.
        serving: uids of the pods that every ready gateway routes to.
        taken: names that no new pod may have.

    Returns:
        Actions in the order in which to do them, whatever the order of `groups`; none when nothing is to be
        done now.
    """
    groups = sorted(groups, key=lambda group: group.name)
    resting = _resting(wanted, groups)
    ended = [group for group in groups if group.ended and not group.terminating and group not in resting]
    live = [group for group in groups if group.live]
    old = [group for group in live if group.revision != wanted.revision]
    current = [group for group in live if group.revision == wanted.revision]
    serving = frozenset(group.uid for group in live if group.uid in serving and group.containers_ready)

    superseded = [group for group in old if not (group.was_routable or group.uid in serving)]
    surplus = _surplus(current, serving, wanted.groups)
    kept = [group for group in live if group not in superseded and group not in surplus]
    made = _missing(wanted, groups, [*kept, *resting], taken)
    replaced = _replaced(wanted, kept, serving)
    return [
        *(DeleteGroup(group.name, group.uid, "Ended") for group in ended),
        *(DeleteGroup(group.name, group.uid, "Superseded") for group in superseded),
        *(DeleteGroup(group.name, group.uid, "Surplus") for group in surplus),
        *made,
        *(DeleteGroup(group.name, group.uid, "Replaced") for group in replaced),
    ]


def _resting(wanted: Wanted, groups: Sequence[Group]) -> list[Group]:
    """Groups that have ended and keep their places, as many as are missing."""
    mine = [group for group in groups if group.revision == wanted.revision and not group.terminating]
    resting = sorted((group for group in mine if group.resting), key=lambda group: -group.incarnation)
    return resting[: max(0, wanted.groups - sum(group.live for group in mine))]


def _worst_first(groups: Sequence[Group], serving: frozenset[str]) -> list[Group]:
    """Groups that fail, then those that do not serve, then the highest numbers."""
    return sorted(
        groups,
        key=lambda group: (
            group.uid in serving,
            not group.failing,
            group.containers_ready,
            group.was_routable,
            -group.group,
            -group.incarnation,
            group.name,
        ),
    )


def _surplus(current: Sequence[Group], serving: frozenset[str], groups: int) -> list[Group]:
    return _worst_first(current, serving)[: max(0, len(current) - groups)]


def _missing(
    wanted: Wanted, groups: Sequence[Group], kept: Sequence[Group], taken: frozenset[str]
) -> list[CreateGroup]:
    current = sum(group.revision == wanted.revision for group in kept)
    number = min(wanted.groups - current, wanted.groups + MAX_SURGE - len(kept))
    used = {group.group for group in kept}
    made: list[CreateGroup] = []
    index = 0
    while len(made) < number:
        if index not in used:
            made.append(_create(wanted, index, groups, taken))
        index += 1
    return made


def _create(wanted: Wanted, index: int, groups: Sequence[Group], taken: frozenset[str]) -> CreateGroup:
    """The next incarnation of a group: one above the highest seen of its number and revision."""
    seen = [
        group.incarnation for group in groups if (group.revision, group.group) == (wanted.revision, index)
    ]
    incarnation = max(seen, default=-1) + 1
    while (name := labels.pod_name(wanted.service, wanted.revision, index, incarnation)) in taken:
        incarnation += 1
    return CreateGroup(name, index, wanted.revision, incarnation, "Replaces" if seen else "Missing")


def _replaced(wanted: Wanted, kept: Sequence[Group], serving: frozenset[str]) -> list[Group]:
    left = sum(group.uid in serving for group in kept)
    enough = wanted.groups - MAX_UNAVAILABLE
    replaced: list[Group] = []
    old = [group for group in kept if group.revision != wanted.revision]
    for group in _worst_first(old, serving):
        after = left - (group.uid in serving)
        if after >= enough:
            replaced.append(group)
            left = after
    return replaced
