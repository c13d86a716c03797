"""How a rollout goes on: what its memory learns from a look, and what the planner is asked for. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from mizzen_operator.api.types import InferenceService
from mizzen_operator.kube.objects import digest
from mizzen_operator.pods.group import Group
from mizzen_operator.rollout.actions import Wanted
from mizzen_operator.rollout.state import Failure, GivenUp, Memory, Progress, recall

WINDOW = timedelta(hours=1)
"""Within which failures of a group are counted."""
MAX_FAILURES = 64
MAX_MESSAGE = 1024
RESTART_BUDGET = "RestartBudgetExceeded"
VERIFICATION = "VerificationFailed"


def spec_hash(service: InferenceService) -> str:
    """Hash of a spec without its replicas, which others write too."""
    return digest({key: value for key, value in service.spec.items() if key != "replicas"})


def verification_name(service: InferenceService) -> str:
    """Name of what groups are verified by, empty without golden prompts.

    Each spec has its own: whatever is changed, a group that answered wrong is asked again.
    """
    return spec_hash(service)[:8] if service.rollout.verification is not None else ""


def refused(service: InferenceService, revision: str) -> bool:
    """Whether the status says that this revision of this spec failed its golden prompts."""
    found = recall(service.status).given_up
    return found is not None and (found.reason, found.revision, found.spec) == (
        VERIFICATION,
        revision,
        spec_hash(service),
    )


def stay(service: InferenceService, current: str, revision: str) -> int:
    """How many groups of revisions older than `revision` shall stay; `current` is the stable one."""
    return min(service.rollout.partition, service.groups) if current not in ("", revision) else 0


def learn(
    service: InferenceService,
    revision: str,
    groups: Sequence[Group],
    serving: frozenset[str],
    now: datetime,
) -> Memory:
    """Bring what the status remembers up to date.

    Args:
        service: with the status that was written last.
        revision: what its groups should run.
        groups: its pods as they are now.
        serving: uids of the pods that every ready gateway routes to.
        now: the time, in UTC.
    """
    now = now.replace(microsecond=0)
    before = recall(service.status)
    live = [group for group in groups if group.live]
    serves = [g for g in live if g.revision == revision and g.uid in serving and g.containers_ready]
    old = [group for group in live if group.revision != revision]
    failures = _failures(service.status, before.failures, groups, now)
    given_up = before.given_up
    fewer = _retired_numbers(given_up, service.groups)
    if given_up is not None and (given_up.revision, given_up.spec) != (revision, spec_hash(service)):
        given_up = None
        failures = tuple(failure for failure in failures if failure.revision != revision)
    elif given_up is not None and fewer:
        given_up = _without(given_up, fewer)
        failures = tuple(one for one in failures if one.revision != revision or one.group not in fewer)
    lifted = before.given_up is not None and given_up is None
    proven = before.current == revision or any(
        group.was_routable or group.verified or group.uid in serving
        for group in live
        if group.revision == revision
    )
    wrong = _wrong(service, revision, live)
    if proven:
        failures = _with_wrong(failures, wrong, now)
    elif wrong and given_up is None:
        given_up = _refusal(service, revision, wrong[0], before.current)
    given_up = _given_up(service, given_up, revision, failures, groups)
    if given_up is not None:
        given_up = replace(given_up, wanted=service.groups)
    current = _current(service, before.current, revision, len(serves), old, live)
    progress = Progress(
        revision, service.groups, len(serves), len(old), now, stay(service, current, revision)
    )
    return Memory(
        current=current,
        progress=_progress(service, None if lifted else before.progress, progress),
        failures=_kept(failures, given_up),
        given_up=given_up,
    )


def _current(
    service: InferenceService,
    before: str,
    revision: str,
    serving: int,
    old: Sequence[Group],
    live: Sequence[Group],
) -> str:
    """The stable revision: the newest one once it alone serves, or once nothing is there and nothing wanted.

    One that is to be verified, or tried beside another, has shown nothing by that: it stays to be tried.
    Of one of which no group is left while others have served, nothing is stable any more: those are.
    """
    if service.rollout.paused and before:
        return before
    tried = service.rollout.verification is not None or service.rollout.partition > 0
    if not live and service.groups == 0 and not tried:
        return revision
    if serving >= service.groups > 0 and not old:
        return revision
    served = Counter(group.revision for group in old if group.was_routable)
    if before and (not served or any(group.revision == before for group in live)):
        return before
    # None is left of it; or the status is of a release that did not remember it, or was lost.
    return max(served, key=lambda name: (served[name], name), default="")


def _retired_numbers(given_up: GivenUp | None, groups: int) -> frozenset[int]:
    """Numbers of groups that were given up which are forgotten, because fewer `groups` are wanted.

    One for each that is wanted no more, so that none is lacking that was not before; at zero, every one.
    """
    if given_up is None:
        return frozenset()
    numbers = sorted(given_up.groups, reverse=True)
    return frozenset(numbers[: max(0, given_up.wanted - groups)] if groups else numbers)


def _without(given_up: GivenUp, numbers: frozenset[int]) -> GivenUp | None:
    left = tuple(number for number in given_up.groups if number not in numbers)
    return replace(given_up, groups=left) if left or given_up.reason != RESTART_BUDGET else None


def _progress(service: InferenceService, before: Progress | None, now: Progress) -> Progress | None:
    """How far the groups came at best, and when that changed last.

    Another aim begins anew where the one before was reached. Where it was not, it changes no time: else who
    scales a service again and again would keep a rollout that gets nowhere from ever being overdue.
    """
    if service.rollout.paused:
        return None
    if before is None or before.revision != now.revision:
        return now
    if (before.groups, before.stay) != (now.groups, now.stay) and before.reached:
        return now
    further = now.serving > before.serving or now.old < before.old
    return replace(
        now,
        serving=max(now.serving, before.serving),
        old=min(now.old, before.old),
        time=now.time if further else before.time,
    )


def _failures(
    status: Mapping[str, Any], before: Sequence[Failure], groups: Sequence[Group], now: datetime
) -> tuple[Failure, ...]:
    """Failures within the window: those remembered, and restarts that the status does not count yet."""
    counted = {entry["name"]: entry.get("restarts", 0) for entry in status.get("groups", ())}
    listed = len(counted)
    for name, number in Counter(failure.name for failure in before).items():
        counted[name] = max(number, counted.get(name, 0))  # also of a pod that a look has missed
    found = [failure for failure in before if now - failure.time < WINDOW]
    for group in sorted(groups, key=lambda group: group.name):
        if group.name not in counted and listed >= MAX_FAILURES:
            continue  # the status lists the worst groups alone
        number = min(group.restarts - counted.get(group.name, 0), MAX_FAILURES)
        found += [Failure(group.group, group.name, group.revision, now)] * max(0, number)
    return tuple(found)


def _kept(failures: Sequence[Failure], given_up: GivenUp | None) -> tuple[Failure, ...]:
    """As many failures as a status holds: of those that fail most, so that one after another is given up.

    Were the oldest left out, many groups that fail by turns would all stay below their budget for ever. What
    was given up needs no counting any more.
    """
    past = {(one.revision, number) for one in (given_up,) if one is not None for number in one.groups}
    counts = Counter((failure.revision, failure.group) for failure in failures)
    most = sorted(counts, key=lambda which: (which in past, -counts[which], which))
    rank = {which: place for place, which in enumerate(most)}
    latest = sorted(enumerate(failures), key=lambda one: (rank[one[1].revision, one[1].group], -one[0]))
    return tuple(failure for _, failure in sorted(latest[:MAX_FAILURES]))


def _wrong(service: InferenceService, revision: str, live: Sequence[Group]) -> list[Group]:
    """Groups of a revision that failed the golden prompts as they are now."""
    name = verification_name(service)
    found = [g for g in live if name and g.held and (g.revision, g.refused_by) == (revision, name)]
    return sorted(found, key=lambda group: group.name)


def _with_wrong(failures: Sequence[Failure], wrong: Sequence[Group], now: datetime) -> tuple[Failure, ...]:
    """Failures, with one of each group that answered wrong: its pod goes, and its restarts say nothing."""

    def counted(group: Group) -> bool:
        made = datetime.fromisoformat(group.created) if group.created else now - WINDOW
        return any(one.name == group.name and one.time >= made for one in failures)

    more = [Failure(g.group, g.name, g.revision, now) for g in wrong if not counted(g)]
    return (*failures, *more)


def _refusal(service: InferenceService, revision: str, group: Group, stable: str) -> GivenUp:
    """Why a revision is not tried again after its first group answered wrong."""
    verification = service.rollout.verification
    keep = verification is not None and verification.on_failure == "Pause"
    then = f"revision {stable} serves on" if stable not in ("", revision) else "no other revision has served"
    if keep:
        then += "; the group is kept, without requests"
    which = f"group {group.group} of revision {revision}"
    message = f"{which} failed spec.rollout.verification: {group.refusal}; {then}"
    return GivenUp(revision, spec_hash(service), (), VERIFICATION, message[:MAX_MESSAGE])


def _given_up(
    service: InferenceService,
    before: GivenUp | None,
    revision: str,
    failures: Sequence[Failure],
    groups: Sequence[Group],
) -> GivenUp | None:
    most = service.lifecycle.max_group_restarts
    if not most:
        return before if before is not None and before.reason != RESTART_BUDGET else None
    numbers = Counter(failure.group for failure in failures if failure.revision == revision)
    over = {number for number, count in numbers.items() if count > most}
    known = set(before.groups) if before is not None else set[int]()
    if over <= known:
        return before
    worst = min(over - known)
    words = next((g.message for g in groups if (g.group, g.revision) == (worst, revision) and g.message), "")
    message = (
        f"group {worst} of revision {revision} failed more than {most} times within an hour"
        f"{f' ({words})' if words else ''}: it is not started again until the spec changes, or fewer groups "
        "are wanted"
    )
    every = tuple(sorted(known | over))
    if before is not None:
        return replace(before, groups=every)
    return GivenUp(revision, spec_hash(service), every, RESTART_BUDGET, message)


def wanted(service: InferenceService, revision: str, memory: Memory, *, restorable: bool) -> Wanted:
    """What the planner is asked for.

    Args:
        service: whose spec it is.
        revision: what its groups should run.
        memory: what is remembered as of now.
        restorable: the stable revision is known well enough to make groups of it.
    """
    verification = service.rollout.verification
    surge, unavailable = service.rollout.surge(service.groups), service.rollout.unavailable(service.groups)
    return Wanted(
        service=service.name,
        groups=service.groups,
        revision=revision,
        stable=memory.current,
        restorable=restorable,
        surge=surge,
        unavailable=unavailable,
        partition=service.rollout.partition,
        paused=service.rollout.paused,
        given_up=frozenset(memory.given_up.groups) if memory.given_up is not None else frozenset(),
        verification=verification_name(service),
        refused=memory.given_up is not None and memory.given_up.reason == VERIFICATION,
        keep_refused=verification is not None and verification.on_failure == "Pause",
    )


def overdue(service: InferenceService, memory: Memory, now: datetime) -> bool:
    """Whether a rollout that is not done has got nowhere for too long."""
    left = seconds_left(service, memory, now)
    return left is not None and left <= 0


def seconds_left(service: InferenceService, memory: Memory, now: datetime) -> float | None:
    """Time until a rollout is overdue; None when nothing is waited for, as while it is paused."""
    if memory.progress is None or memory.progress.reached:
        return None
    return service.rollout.progress_deadline - (now - memory.progress.time).total_seconds()
