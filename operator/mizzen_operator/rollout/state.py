# SPDX-License-Identifier: Apache-2.0
"""Rollout state, which is kept in a service's status from one reconcile to the next.

It consists of the stable revision, the progress of the newest revision, the failures of groups within the
last hour, and the abandoned revision or groups; `rollout/progress.py` updates it. All other state is derived
from observed objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from mizzen_operator.kube.objects import timestamp


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """Progress of the groups of one revision.

    Attributes:
        revision: the revision.
        groups: number of groups wanted.
        serving: largest number of groups of the revision that have served at the same time.
        outdated: smallest number of groups of other revisions that have existed during the rollout.
        time: time at which `serving` or `outdated` last improved.
        keep_old: number of groups of other revisions to keep.
    """

    revision: str
    groups: int
    serving: int
    outdated: int
    time: datetime
    keep_old: int = 0

    @property
    def complete(self) -> bool:
        """Whether the rollout has reached its target."""
        return self.serving >= self.groups - self.keep_old and self.outdated <= self.keep_old


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """One failure of a group: its engine exited and was restarted, or it failed its golden prompts.

    Attributes:
        index: the group's number.
        name: the group's name.
        revision: the group's revision.
        time: time at which the failure was first seen.
        node: node on which the engine lost its device; empty for another failure.
    """

    index: int
    name: str
    revision: str
    time: datetime
    node: str = ""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A record of an abandoned revision, or of the abandoned groups of a revision.

    Abandoned groups are not created again until a field of the spec other than `replicas` changes. Some of
    them are also retried if fewer groups are wanted.

    Attributes:
        revision: the revision.
        spec_hash: hash of the spec of that revision.
        groups: indexes of the abandoned groups; empty if the revision itself is abandoned.
        reason: reason of the condition Failed.
        message: message of the condition Failed.
        wanted_groups: number of groups that were wanted at the last reconcile.
    """

    revision: str
    spec_hash: str
    groups: tuple[int, ...]
    reason: str
    message: str
    wanted_groups: int = 0


@dataclass(frozen=True, slots=True)
class RolloutState:
    """State of a service's rollout.

    Attributes:
        stable_revision: the last revision that served with all its groups; empty if none did.
        progress: progress of the newest revision; None while the rollout is paused, so that its progress
            deadline starts again afterwards.
        failures: failures of groups within the last hour.
        abandoned: record of the abandoned revision or groups of the current spec; None if nothing is
            abandoned.
    """

    stable_revision: str = ""
    progress: RolloutProgress | None = None
    failures: tuple[GroupFailure, ...] = ()
    abandoned: Abandoned | None = None

    def as_status(self) -> dict[str, Any]:
        """Return the fields of the status that contain this state; `load_state` is the inverse."""
        fields: dict[str, Any] = {"currentRevision": self.stable_revision}
        if self.progress is not None:
            fields["progress"] = {
                "revision": self.progress.revision,
                "groups": self.progress.groups,
                "serving": self.progress.serving,
                "old": self.progress.outdated,
                "time": timestamp(self.progress.time),
                "stay": self.progress.keep_old,
            }
        if self.failures:
            fields["recentFailures"] = [
                {
                    "group": failure.index,
                    "name": failure.name,
                    "revision": failure.revision,
                    "time": timestamp(failure.time),
                    **({"node": failure.node} if failure.node else {}),
                }
                for failure in self.failures
            ]
        if self.abandoned is not None:
            fields["givenUp"] = {
                "revision": self.abandoned.revision,
                "spec": self.abandoned.spec_hash,
                "groups": list(self.abandoned.groups),
                "reason": self.abandoned.reason,
                "message": self.abandoned.message,
                "wanted": self.abandoned.wanted_groups,
            }
        return {key: value for key, value in fields.items() if value != ""}


def limit_times(state: RolloutState, now: datetime) -> RolloutState:
    """Return the state without times in the future, which a leader with a faster clock may have written.

    Without the limit, a failure would count, or a deadline be extended, until our clock has caught up.
    """
    progress = state.progress
    return replace(
        state,
        progress=replace(progress, time=min(progress.time, now)) if progress is not None else None,
        failures=tuple(replace(failure, time=min(failure.time, now)) for failure in state.failures),
    )


def load_state(status: Mapping[str, Any]) -> RolloutState:
    """Load the state from a status; missing or invalid fields are treated as unset."""
    progress, abandoned = status.get("progress"), status.get("givenUp")
    return RolloutState(
        stable_revision=status.get("currentRevision", ""),
        progress=RolloutProgress(
            revision=progress.get("revision", ""),
            groups=progress.get("groups", 0),
            serving=progress.get("serving", 0),
            outdated=progress.get("old", 0),
            time=datetime.fromisoformat(progress["time"]),
            keep_old=progress.get("stay", 0),
        )
        if progress and "time" in progress
        else None,
        failures=tuple(
            GroupFailure(
                index=entry["group"],
                name=entry["name"],
                revision=entry.get("revision", ""),
                time=datetime.fromisoformat(entry["time"]),
                node=entry.get("node", ""),
            )
            for entry in status.get("recentFailures", ())
        ),
        abandoned=Abandoned(
            revision=abandoned["revision"],
            spec_hash=abandoned["spec"],
            groups=tuple(abandoned.get("groups", ())),
            reason=abandoned["reason"],
            message=abandoned["message"],
            wanted_groups=abandoned.get("wanted", 0),
        )
        if abandoned
        else None,
    )
