"""What to do next for the groups of a service: pure arithmetic over what is there.

`plan` is level-triggered: it is called again after every change and knows nothing of earlier calls. So a
revert in the middle of a rollout, a change of `replicas` during one, and a pod that dies during either are no
cases of their own. *New* groups are of the revision that is wanted, *old* ones of any other; the *stable*
revision is the one that served last with all its groups. Two numbers say what is aimed at, `_aims`: how many
new groups there shall be, and how many old ones shall stay. Then the rules, in the order in which they apply:

1. *ended*: a group that will not run again is deleted. One that ended before it served *rests* for a while
   first, in the place of its replacement: what ends at once would otherwise be made again without pause.
   Of a group of several pods all go when one ends, goes or is gone: half a group is none.
2. *refused*: a new group that answered its golden prompts wrong is deleted, and made anew where the revision
   has shown that it serves. Where it has not, the revision is refused: then its other groups are deleted too,
   and the old ones stay or are restored. With `keep_refused` everything stays as it is instead.
3. *given up*: a new group that failed too often is deleted once it is not ready, and its number is not
   used again.
4. *superseded*: an old group that never served is deleted, for nothing is lost with it, unless it is one
   of the stable revision that shall stay.
5. *surplus*: more new groups than aimed at: the worst ones are retired; of those that serve, only as long as
   enough others do.
6. *restored*: groups of the stable revision are made where fewer old ones are left than shall stay; none
   after a revert to it whose groups were given up or refused.
7. *missing*: new groups are made. With what rule 6 made there are never more than `groups + surge` in all.
8. *replaced*: old groups that served, beyond those that shall stay, are retired as long as enough others
   serve. One whose engine is not ready, or to which no gateway that answers routes, goes without that, for
   nothing is lost with it, while enough others serve or have served: else a rollout that mends what has
   broken would wait for it for ever. One that is a *stranger* goes without that, too, and counts for none
   that has served: its engine speaks another protocol than every gateway, so it serves nobody and never will.
   After an upgrade that changed the protocol all old ones are: the first new one that serves lets them go.

Of a new group of several pods that the operator was kept from making whole, the others are made, *completed*.

Enough is `groups - unavailable`. Serving means that every ready gateway, and at least one, routes to the
group now; a group that is held back until it is verified never does. A terminating pod counts for nothing:
its replacement does not wait for its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from mizzen_operator.api import labels
from mizzen_operator.pods.group import Group
from mizzen_operator.rollout.actions import Action, CreateGroup, DeleteGroup, Wanted


def plan(
    wanted: Wanted,
    groups: Sequence[Group],
    serving: frozenset[str],
    taken: frozenset[str] = frozenset(),
) -> list[Action]:
    """Say what to do now.

    Args:
        wanted: what the spec asks for.
        groups: the service's groups, terminating ones too.
        serving: uids of the leading pods that every ready gateway routes to.
        taken: names that no new pod may have.

    Returns:
        Actions in the order in which to do them, whatever the order of `groups`; none when nothing is to be
        done now.
    """
    groups = sorted(groups, key=lambda group: group.name)
    live = [group for group in groups if group.live]
    serving = frozenset(group.uid for group in live if group.uid in serving and group.containers_ready)
    serving -= {group.uid for group in live if group.held}
    old = [group for group in live if group.revision != wanted.revision]
    every_new = [group for group in live if group.revision == wanted.revision]
    given_up = [g for g in every_new if g.group in wanted.given_up and not g.containers_ready]
    refused = [] if wanted.refused and wanted.keep_refused else _refused(wanted, every_new)
    new = [group for group in every_new if group not in given_up and group not in refused]
    aim, stay = _aims(wanted, old, new, serving)

    served = [group for group in old if group.was_routable or group.uid in serving]
    fresh = [group for group in old if group not in served]
    coming = [group for group in fresh if group.revision == wanted.stable and not group.held]
    coming = _worst_first(coming, serving)[::-1][: max(0, stay - len(served))]
    superseded = [group for group in fresh if group not in coming]
    known = [group for group in (*new, *old) if group.was_routable or group.uid in serving]
    known = [group for group in known if not _is_stranger(group, serving)]
    surplus, left = _surplus(wanted, new, len(new) - aim, stay, serving, known)

    kept = [group for group in live if group not in (*superseded, *surplus, *given_up, *refused)]
    resting = _resting(groups, wanted.revision, aim - len(new))
    resting_old = _resting(groups, wanted.stable, stay - len(served) - len(coming))
    ended = [
        group for group in groups if not group.live and group.left and group not in (*resting, *resting_old)
    ]
    places = wanted.groups + wanted.surge - len(kept) - len(resting) - len(resting_old)
    restorable = wanted.restorable and not (wanted.stable == wanted.revision and wanted.failed)
    restored = stay - len(served) - len(coming) - len(resting_old) if restorable else 0
    missing = aim - sum(group.revision == wanted.revision for group in kept) - len(resting)
    made = _made(
        wanted,
        [wanted.stable] * min(restored, places) + [wanted.revision] * min(missing, places - max(0, restored)),
        groups,
        {group.group for group in (*kept, *resting, *resting_old)},
        taken,
    )
    foreign = [group for group in served if group.revision != wanted.stable]
    stable = [group for group in served if group.revision == wanted.stable]
    going = [*_worst_first(foreign, serving), *_worst_first(stable, serving)]
    known = [group for group in known if group not in surplus]
    replaced, _ = _retired(going, len(served) - stay, left, wanted.enough, serving, len(known))
    created = [*_completed(kept), *made]
    created.sort(key=lambda one: one.revision == wanted.revision)  # there may be room for the first alone
    return [
        *_deleted(ended, "Ended"),
        *_deleted(refused, "Refused"),
        *_deleted([group for group in given_up if group not in refused], "GivenUp"),
        *_deleted(superseded, "Superseded"),
        *_deleted(surplus, "Surplus"),
        *created,
        *_deleted(replaced, "Replaced"),
    ]


def _aims(
    wanted: Wanted, old: Sequence[Group], new: Sequence[Group], serving: frozenset[str]
) -> tuple[int, int]:
    """How many new groups there shall be, and how many old ones shall stay."""
    gone = wanted.given_up - {group.group for group in new}
    rest = min(wanted.groups, max(wanted.groups - len(gone), len(new)))  # nothing that is there goes for it
    known = wanted.stable not in ("", wanted.revision)
    if wanted.refused:
        return _aims_refused(wanted, known or bool(old), new)
    # Case 1: there is nothing old: no rollout, or the first one, which neither partition nor pause concerns.
    if not (known or old):
        return rest, 0
    proven = any(group.was_routable or group.uid in serving for group in new)
    partition = min(wanted.partition, wanted.groups) if known else 0
    aim = min(rest, wanted.groups - partition)
    # Case 2: nothing shall go on, for it is paused, or the revision failed before it ever served.
    if (wanted.paused and known) or (wanted.given_up and not proven):
        aim = min(aim, len(new))
        return aim, wanted.groups - aim
    # Case 3: the revision has not shown yet that it serves: it takes no place that must not be empty.
    if not proven and known:
        return aim, max(partition, wanted.enough)
    # Case 4: it serves, and takes the places of all but the partition.
    return aim, partition


def _aims_refused(wanted: Wanted, former: bool, new: Sequence[Group]) -> tuple[int, int]:
    """The same for a revision that failed its golden prompts; `former` tells whether there is another one.

    Unless all stays as it is, `new` are those that have served: of the others none stays.
    """
    if wanted.keep_refused:
        return len(new), wanted.groups if former else 0
    return (0, wanted.groups) if former else (min(len(new), wanted.groups), 0)


def _refused(wanted: Wanted, new: Sequence[Group]) -> list[Group]:
    """New groups that answered wrong; all that never served once the revision itself is refused."""
    if wanted.refused:
        return [group for group in new if not group.was_routable]
    return [
        group
        for group in new
        if group.held and wanted.verification and group.refused_by == wanted.verification
    ]


def _surplus(
    wanted: Wanted,
    new: Sequence[Group],
    number: int,
    stay: int,
    serving: frozenset[str],
    known: Sequence[Group],
) -> tuple[list[Group], int]:
    """New groups that go because there are too many; and how many groups serve then.

    Where old ones take their places, those that served wait until enough others do. `known` are all groups
    that serve, or have served.
    """
    worst = _worst_first(new, serving)[: max(0, number)]
    waiting = [group for group in worst if stay and (group.was_routable or group.uid in serving)]
    free = [group for group in worst if group not in waiting]
    # equivalent mutant (other operator): what serves is free to go where nothing old is left alone
    left = len(serving) - sum(group.uid in serving for group in free)
    others = sum(group not in free for group in known)
    retired, left = _retired(waiting, len(waiting), left, wanted.enough, serving, others)
    return [*free, *retired], left


def _retired(
    going: Sequence[Group], number: int, left: int, enough: int, serving: frozenset[str], known: int
) -> tuple[list[Group], int]:
    """At most `number` of `going` that may go while `left` groups serve; and how many serve then.

    One that is ready and not seen to serve goes no sooner while its gate is open: it may be that no gateway
    answers. One that is not ready, or has its gate closed, may go where more than enough groups are `known`:
    that serve, or have served. A stranger may always go: every gateway answers, and says that it can never
    route to it.
    """
    retired: list[Group] = []
    for group in going:
        after = left - (group.uid in serving)
        stranger = _is_stranger(group, serving)
        out = group.uid not in serving and not (group.containers_ready and group.routable)
        broken = out and known > enough
        if len(retired) < number and (after >= enough or broken or stranger):
            retired.append(group)
            left, known = after, known - (not stranger)
    return retired, left


def _is_stranger(group: Group, serving: frozenset[str]) -> bool:
    return group.stranger and group.uid not in serving


def _deleted(groups: Sequence[Group], reason: str) -> list[DeleteGroup]:
    return [DeleteGroup(group.name, group.uid, reason, group.left) for group in groups]


def _completed(groups: Sequence[Group]) -> list[CreateGroup]:
    """What is missing of groups that were not made whole."""
    return [
        CreateGroup(one.name, one.group, one.revision, one.incarnation, "Incomplete", one.missing)
        for one in groups
        if one.missing
    ]


def _resting(groups: Sequence[Group], revision: str, missing: int) -> list[Group]:
    """Groups of a revision that have ended and keep their places, as many as are missing."""
    resting = [g for g in groups if g.revision == revision and g.resting and not (g.terminating or g.lost)]
    return sorted(resting, key=lambda group: -group.incarnation)[: max(0, missing)]


def _worst_first(groups: Sequence[Group], serving: frozenset[str]) -> list[Group]:
    """Strangers, then groups that fail, then those that do not serve, then the highest numbers."""
    return sorted(
        groups,
        key=lambda group: (
            group.uid in serving,
            not _is_stranger(group, serving),
            not group.failing,
            group.containers_ready,
            group.was_routable,
            -group.group,
            -group.incarnation,
        ),
    )


def _made(
    wanted: Wanted, revisions: Sequence[str], groups: Sequence[Group], used: set[int], taken: frozenset[str]
) -> list[CreateGroup]:
    """One group of each of the revisions, with the lowest numbers that are free."""
    made: list[CreateGroup] = []
    for revision in revisions:
        index = 0
        while index in used or (revision == wanted.revision and index in wanted.given_up):
            index += 1
        used = used | {index}
        made.append(_create(wanted, revision, index, groups, taken))
    return made


def _create(
    wanted: Wanted, revision: str, index: int, groups: Sequence[Group], taken: frozenset[str]
) -> CreateGroup:
    """The next incarnation of a group: one above the highest seen of its number and revision."""
    seen = [group.incarnation for group in groups if (group.revision, group.group) == (revision, index)]
    incarnation = max(seen, default=-1) + 1
    while _is_taken(name := labels.pod_name(wanted.service, revision, index, incarnation), taken):
        incarnation += 1
    reason = "Replaces" if seen else "Restored" if revision != wanted.revision else "Missing"
    return CreateGroup(name, index, revision, incarnation, reason)


def _is_taken(name: str, taken: frozenset[str]) -> bool:
    """Whether a group's leading pod, or another pod of it, cannot have its name."""
    return name in taken or any(other.startswith(f"{name}-") for other in taken)
