# SPDX-License-Identifier: Apache-2.0
"""Restart budget: counts the failures of groups, and abandons groups and revisions that fail too often.

Called only by `rollout/progress.py`. A group may fail `spec.lifecycle.maxGroupRestarts` times within an hour.
A revision that fails its golden prompts before it has served is abandoned at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from mizzen_operator.api import reasons
from mizzen_operator.api.reasons import MAX_MESSAGE
from mizzen_operator.api.types import InferenceService
from mizzen_operator.pods.group import Group
from mizzen_operator.rollout.spec_identity import spec_hash, verification_id
from mizzen_operator.rollout.state import Abandoned, GroupFailure

CONFIGURATION_RETRY = timedelta(minutes=10)
"""Time after which a group with an invalid configuration is started again, because the cause may have been
outside the spec, for example a model folder that was still empty."""
FAILURE_WINDOW = timedelta(hours=1)
"""Period within which failures of a group count towards its restart budget."""
MAX_FAILURES = 64
"""Maximum number of failures that the status of a service records."""


def count_failures(
    status: Mapping[str, Any], failures: Sequence[GroupFailure], groups: Sequence[Group], now: datetime
) -> tuple[GroupFailure, ...]:
    """Return the failures within the window, including new restarts that the status does not count yet.

    Args:
        status: the status that was written last; its `groups` contain the restarts that were counted.
        failures: the failures in that status.
        groups: the observed groups.
        now: the time, in UTC.
    """
    counted = {entry["name"]: entry.get("restarts", 0) for entry in status.get("groups", ())}
    listed = len(counted)
    for name, number in Counter(failure.name for failure in failures).items():
        # A group with failures may be missing from `status.groups`, if the last reconcile did not observe it.
        counted[name] = max(number, counted.get(name, 0))
    counted_failures = [failure for failure in failures if now - failure.time < FAILURE_WINDOW]
    for group in sorted(groups, key=lambda group: group.name):
        if group.name not in counted and listed >= MAX_FAILURES:
            continue  # the status lists only the worst groups, so this group's restarts may have been counted
        number = min(group.restarts - counted.get(group.name, 0), MAX_FAILURES)
        failure = GroupFailure(group.index, group.name, group.revision, now)
        if number > 0:  # at most the last one is the loss of a device, because the group then ends
            last = replace(failure, node=group.lost_device_node)
            counted_failures += [*[failure] * (number - 1), last]
    return tuple(counted_failures)


def limit_failures(failures: Sequence[GroupFailure], abandoned: Abandoned | None) -> tuple[GroupFailure, ...]:
    """Return at most `MAX_FAILURES` failures, preferring those of the groups that fail most often.

    If the oldest failures were dropped instead, many groups that fail in turn would all stay below their
    budget forever. Failures of abandoned groups are dropped first, because they no longer have to be counted.
    """
    past = set[tuple[str, int]]()
    if abandoned is not None:
        past = {(abandoned.revision, index) for index in abandoned.groups}
    counts = Counter((failure.revision, failure.index) for failure in failures)
    order = sorted(counts, key=lambda group: (group in past, -counts[group], group))
    rank = {group: position for position, group in enumerate(order)}
    by_rank = sorted(
        enumerate(failures), key=lambda entry: (rank[entry[1].revision, entry[1].index], -entry[0])
    )
    return tuple(failure for _, failure in sorted(by_rank[:MAX_FAILURES]))


def groups_that_failed_verification(
    service: InferenceService, revision: str, live: Sequence[Group]
) -> list[Group]:
    """Return the live groups of a revision that failed the current golden prompts, sorted by name."""
    verification = verification_id(service)
    failed = [
        group
        for group in live
        if verification
        and group.awaiting_verification
        and (group.revision, group.failed_verification) == (revision, verification)
    ]
    return sorted(failed, key=lambda group: group.name)


def add_failures(
    failures: Sequence[GroupFailure], failed: Sequence[Group], now: datetime
) -> tuple[GroupFailure, ...]:
    """Return `failures` with one more for each group of `failed` whose failure is not counted yet.

    These groups failed their verification, or their configuration cannot work. Their pods are deleted instead
    of restarted, so the failure is not counted as a restart. The group's name alone identifies it: its
    creation time comes from another clock than the times of failures.
    """
    counted = {failure.name for failure in failures}
    added = [
        GroupFailure(group.index, group.name, group.revision, now)
        for group in failed
        if group.name not in counted
    ]
    return (*failures, *added)


def abandon_unverified_revision(
    service: InferenceService, revision: str, group: Group, stable: str
) -> Abandoned:
    """Return the record that abandons a revision because one of its groups failed verification.

    Args:
        service: the service.
        revision: the revision to abandon.
        group: the group that failed.
        stable: the stable revision; empty if no revision is stable.
    """
    verification = service.rollout.verification
    pause = verification is not None and verification.on_failure == "Pause"
    outcome = (
        f"revision {stable} continues to serve"
        if stable not in ("", revision)
        else "no other revision has served"
    )
    if pause:
        outcome += "; the group is kept, but gets no requests"
    failed = f"group {group.index} of revision {revision}"
    message = f"{failed} failed spec.rollout.verification: {group.verification_error}; {outcome}"
    return Abandoned(revision, spec_hash(service), (), reasons.VERIFICATION_FAILED, message[:MAX_MESSAGE])


def abandon_misconfigured_groups(
    service: InferenceService, abandoned: Abandoned | None, revision: str, misconfigured: Sequence[Group]
) -> Abandoned | None:
    """Return the record of abandoned groups, including groups whose configuration cannot work.

    Args:
        service: the service.
        abandoned: the record so far; None if nothing was abandoned.
        revision: revision of the spec, which has not served yet.
        misconfigured: the misconfigured groups of the revision. A new record quotes the message of the first.
    """
    indexes = {group.index for group in misconfigured}
    if abandoned is not None:
        if abandoned.reason != reasons.INVALID_CONFIGURATION or indexes <= set(abandoned.groups):
            return abandoned
        return replace(abandoned, groups=tuple(sorted(indexes.union(abandoned.groups))))
    if not indexes:
        return None
    first = min(misconfigured, key=lambda group: group.index)
    minutes = CONFIGURATION_RETRY // timedelta(minutes=1)
    message = (
        f"{first.message[: MAX_MESSAGE // 2]}; group {first.index} of revision {revision} is started again "
        f"when the spec changes, and every {minutes} minutes"
    )
    return Abandoned(
        revision, spec_hash(service), tuple(sorted(indexes)), reasons.INVALID_CONFIGURATION, message
    )


def seconds_to_configuration_retry(
    abandoned: Abandoned | None, failures: Sequence[GroupFailure], now: datetime
) -> float | None:
    """Return the seconds until misconfigured groups are started again; None if none were abandoned."""
    if abandoned is None or abandoned.reason != reasons.INVALID_CONFIGURATION:
        return None
    times = [
        failure.time
        for failure in failures
        if failure.revision == abandoned.revision and failure.index in abandoned.groups
    ]
    return (max(times, default=now) + CONFIGURATION_RETRY - now).total_seconds()


def abandon_groups_over_budget(
    service: InferenceService,
    abandoned: Abandoned | None,
    revision: str,
    failures: Sequence[GroupFailure],
    groups: Sequence[Group],
) -> Abandoned | None:
    """Return the record of abandoned groups, including groups that now exceed their restart budget.

    Args:
        service: the service; its `maxGroupRestarts` is the budget, and 0 means no limit.
        abandoned: the record so far; None if nothing was abandoned.
        revision: revision of the spec.
        failures: the failures within the window.
        groups: the observed groups. A new record quotes the message of one abandoned group.
    """
    budget = service.lifecycle.max_group_restarts
    if not budget:
        over_budget = abandoned is not None and abandoned.reason == reasons.RESTART_BUDGET_EXCEEDED
        return None if over_budget else abandoned
    counts = Counter(failure.index for failure in failures if failure.revision == revision)
    over = {index for index, count in counts.items() if count > budget}
    abandoned_indexes = set(abandoned.groups) if abandoned is not None else set[int]()
    if over <= abandoned_indexes:
        return abandoned
    first = min(over - abandoned_indexes)
    details = next(
        (
            group.message
            for group in groups
            if (group.index, group.revision) == (first, revision) and group.message
        ),
        "",
    )
    message = (
        f"group {first} of revision {revision} failed more than {budget} times within an hour"
        f"{f' ({details})' if details else ''}: it is not started again until the spec changes, or fewer "
        "groups are wanted"
    )
    indexes = tuple(sorted(abandoned_indexes | over))
    if abandoned is not None:
        return replace(abandoned, groups=indexes)
    return Abandoned(revision, spec_hash(service), indexes, reasons.RESTART_BUDGET_EXCEEDED, message)


def indexes_scaled_away(abandoned: Abandoned | None, groups: int) -> frozenset[int]:
    """Return the indexes of abandoned groups to retry because fewer groups are wanted than before.

    It returns one index for each group that is no longer wanted, so that the number of groups that are wanted
    but abandoned does not grow. If no groups are wanted, it returns all abandoned indexes.

    Args:
        abandoned: the record of abandoned groups; None if nothing was abandoned.
        groups: number of groups wanted now.
    """
    if abandoned is None:
        return frozenset()
    indexes = sorted(abandoned.groups, reverse=True)
    return frozenset(indexes[: max(0, abandoned.wanted_groups - groups)] if groups else indexes)


def retry_groups(abandoned: Abandoned, indexes: frozenset[int]) -> Abandoned | None:
    """Return the record without the groups that are retried; None if no group remains abandoned."""
    left = tuple(index for index in abandoned.groups if index not in indexes)
    if not left and abandoned.reason != reasons.VERIFICATION_FAILED:
        return None
    return replace(abandoned, groups=left)
