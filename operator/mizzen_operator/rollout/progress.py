# SPDX-License-Identifier: Apache-2.0
"""Progress of a rollout: updates the rollout state, builds the planner's target, checks the deadline. Pure.

The reconciler calls `update_state` once per reconcile, and passes the result of `build_target` to the
planner. The state is written with the status. So if a reconcile fails, the next one starts from the same
state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from mizzen_operator.api import reasons
from mizzen_operator.api.types import InferenceService
from mizzen_operator.pods.group import Group
from mizzen_operator.rollout.actions import RolloutTarget
from mizzen_operator.rollout.avoided_nodes import forget_losses_if_pending
from mizzen_operator.rollout.restart_budget import (
    abandon_groups_over_budget,
    abandon_misconfigured_groups,
    abandon_unverified_revision,
    add_failures,
    count_failures,
    groups_that_failed_verification,
    indexes_scaled_away,
    limit_failures,
    retry_groups,
    seconds_to_configuration_retry,
)
from mizzen_operator.rollout.spec_identity import spec_hash, verification_id
from mizzen_operator.rollout.stable_revision import count_old_to_keep, next_stable_revision
from mizzen_operator.rollout.state import (
    Abandoned,
    GroupFailure,
    RolloutProgress,
    RolloutState,
    limit_times,
    load_state,
)


def update_state(
    service: InferenceService,
    revision: str,
    groups: Sequence[Group],
    serving: frozenset[str],
    now: datetime,
) -> RolloutState:
    """Return the rollout state after an observation.

    Args:
        service: the service, with the status that was written last.
        revision: revision of the spec.
        groups: the observed groups, with the current values of their readiness gates.
        serving: uids of the leading pods that every ready gateway routes to.
        now: the time, in UTC.
    """
    now = now.replace(microsecond=0)
    previous = limit_times(load_state(service.status), now)
    live = [group for group in groups if group.live]
    updated = [group for group in live if group.revision == revision]
    outdated = len(live) - len(updated)
    serving_updated = sum(group.uid in serving and group.containers_ready for group in updated)
    failures = count_failures(service.status, previous.failures, groups, now)
    failures = forget_losses_if_pending(failures, groups)
    abandoned, failures = _retry(service, revision, previous.abandoned, failures, now)
    retried = previous.abandoned is not None and abandoned is None
    failed = groups_that_failed_verification(service, revision, live)
    if _has_served(previous, revision, updated, serving):
        failures = add_failures(failures, failed, now)
    else:
        misconfigured = [
            group
            for group in groups
            if group.misconfigured and group.revision == revision and not group.terminating
        ]
        failures = add_failures(failures, [group for group in misconfigured if group.created], now)
        abandoned = abandon_misconfigured_groups(service, abandoned, revision, misconfigured)
        if failed and abandoned is None:
            abandoned = abandon_unverified_revision(service, revision, failed[0], previous.stable_revision)
    abandoned = abandon_groups_over_budget(service, abandoned, revision, failures, groups)
    if abandoned is not None:
        abandoned = replace(abandoned, wanted_groups=service.groups)
    stable = next_stable_revision(service, previous.stable_revision, revision, live, serving_updated)
    progress = RolloutProgress(
        revision=revision,
        groups=service.groups,
        serving=serving_updated,
        outdated=outdated,
        time=now,
        keep_old=count_old_to_keep(service, stable, revision),
    )
    return RolloutState(
        stable_revision=stable,
        progress=_advance(service, None if retried else previous.progress, progress),
        failures=limit_failures(failures, abandoned),
        abandoned=abandoned,
    )


def _retry(
    service: InferenceService,
    revision: str,
    abandoned: Abandoned | None,
    failures: tuple[GroupFailure, ...],
    now: datetime,
) -> tuple[Abandoned | None, tuple[GroupFailure, ...]]:
    """Return the record of groups that remain abandoned, and the failures without those of retried groups.

    A change of the spec retries all groups. Groups with an invalid configuration are also retried after some
    time. If fewer groups are wanted than before, some abandoned groups are retried, one for each group that
    is no longer wanted.
    """
    if abandoned is None:
        return None, failures
    if (abandoned.revision, abandoned.spec_hash) != (revision, spec_hash(service)):
        return None, tuple(failure for failure in failures if failure.revision != revision)
    left = seconds_to_configuration_retry(abandoned, failures, now)
    if left is not None and left <= 0:
        return None, failures
    indexes = indexes_scaled_away(abandoned, service.groups)
    if not indexes:
        return abandoned, failures
    kept = tuple(
        failure for failure in failures if failure.revision != revision or failure.index not in indexes
    )
    return retry_groups(abandoned, indexes), kept


def _has_served(
    previous: RolloutState, revision: str, updated: Sequence[Group], serving: frozenset[str]
) -> bool:
    """Return whether a revision has served or passed verification at some time."""
    return previous.stable_revision == revision or any(
        group.was_routable or group.verified or group.uid in serving for group in updated
    )


def _advance(
    service: InferenceService, previous: RolloutProgress | None, current: RolloutProgress
) -> RolloutProgress | None:
    """Return the best progress so far, with the time of the last improvement; None if the rollout is paused.

    A change of the number of groups restarts the clock only if the rollout was complete. Otherwise, a rollout
    without progress would never exceed its deadline if a user scaled the service again and again.
    """
    if service.rollout.paused:
        return None
    if previous is None or previous.revision != current.revision:
        return current
    target_changed = (previous.groups, previous.keep_old) != (current.groups, current.keep_old)
    if target_changed and previous.complete:
        return current
    improved = current.serving > previous.serving or current.outdated < previous.outdated
    return replace(
        current,
        serving=max(current.serving, previous.serving),
        outdated=min(current.outdated, previous.outdated),
        time=current.time if improved else previous.time,
    )


def build_target(
    service: InferenceService, revision: str, state: RolloutState, *, restorable: bool
) -> RolloutTarget:
    """Return the planner's target.

    Args:
        service: the service.
        revision: revision of the spec.
        state: the updated rollout state.
        restorable: a ControllerRevision records the stable revision, so its groups can be created.
    """
    verification, abandoned = service.rollout.verification, state.abandoned
    return RolloutTarget(
        service=service.name,
        groups=service.groups,
        revision=revision,
        stable_revision=state.stable_revision,
        can_restore=restorable,
        max_surge=service.rollout.surge_groups(service.groups),
        max_unavailable=service.rollout.unavailable_groups(service.groups),
        partition=service.rollout.partition,
        paused=service.rollout.paused,
        abandoned=frozenset(abandoned.groups) if abandoned is not None else frozenset(),
        verification_id=verification_id(service),
        verification_failed=abandoned is not None and abandoned.reason == reasons.VERIFICATION_FAILED,
        pause_on_failure=verification is not None and verification.on_failure == "Pause",
    )


def is_overdue(service: InferenceService, state: RolloutState, now: datetime) -> bool:
    """Return whether an incomplete rollout has made no progress for `progressDeadlineSeconds`."""
    left = seconds_to_deadline(service, state, now)
    return left is not None and left <= 0


def seconds_to_retry(state: RolloutState, now: datetime) -> float | None:
    """Return the seconds until groups with an invalid configuration are retried; None if no group has one."""
    return seconds_to_configuration_retry(state.abandoned, state.failures, now)


def seconds_to_deadline(service: InferenceService, state: RolloutState, now: datetime) -> float | None:
    """Return the seconds until a rollout exceeds its deadline; None if it is complete or paused."""
    if state.progress is None or state.progress.complete:
        return None
    return service.rollout.progress_deadline - (now - state.progress.time).total_seconds()
