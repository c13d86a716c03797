"""What a service's status remembers of its rollout from one look to the next.

Everything else follows from what is there. Remembered are the revision that served last with all its groups,
how far the newest one came and when, failures of groups within the last hour, and what was given up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mizzen_operator.kube.objects import stamp


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the groups of a revision came.

    Attributes:
        groups: groups that were wanted.
        serving: groups of the revision that served at most.
        old: groups of other revisions that were left at least.
        time: when one of these changed for the better last.
        stay: groups of other revisions that were to stay.
    """

    revision: str
    groups: int
    serving: int
    old: int
    time: datetime
    stay: int = 0

    @property
    def reached(self) -> bool:
        """Whether all was reached that was to be."""
        return self.serving >= self.groups - self.stay and self.old <= self.stay


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure of a group: its engine ended and was started again."""

    group: int
    name: str
    revision: str
    time: datetime


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A revision, or groups of it, that are not tried again until the spec, replicas aside, changes.

    Groups are tried again also where fewer are wanted.

    Attributes:
        spec: hash of the spec that was given up.
        groups: numbers of the groups that failed too often.
        wanted: groups that were wanted at the last look.
    """

    revision: str
    spec: str
    groups: tuple[int, ...]
    reason: str
    message: str
    wanted: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered.

    Attributes:
        current: the revision that served last with all its groups; empty when none did.
        progress: None while the rollout is paused, so that its clock begins anew afterwards.
        given_up: of the spec as it is now; None when nothing of it was.
    """

    current: str = ""
    progress: Progress | None = None
    failures: tuple[Failure, ...] = ()
    given_up: GivenUp | None = None

    def as_status(self) -> dict[str, Any]:
        """The fields of a status."""
        found: dict[str, Any] = {"currentRevision": self.current}
        if self.progress is not None:
            one = self.progress
            found["progress"] = {
                "revision": one.revision,
                "groups": one.groups,
                "serving": one.serving,
                "old": one.old,
                "time": stamp(one.time),
                "stay": one.stay,
            }
        if self.failures:
            found["recentFailures"] = [
                {"group": f.group, "name": f.name, "revision": f.revision, "time": stamp(f.time)}
                for f in self.failures
            ]
        if self.given_up is not None:
            one = self.given_up
            found["givenUp"] = {
                "revision": one.revision,
                "spec": one.spec,
                "groups": list(one.groups),
                "reason": one.reason,
                "message": one.message,
                "wanted": one.wanted,
            }
        return {key: value for key, value in found.items() if value != ""}


def recall(status: Mapping[str, Any]) -> Memory:
    """Read what a status remembers; what it does not hold, or not as it should, is forgotten."""
    progress, given_up = status.get("progress"), status.get("givenUp")
    return Memory(
        current=status.get("currentRevision", ""),
        progress=Progress(
            progress.get("revision", ""),
            progress.get("groups", 0),
            progress.get("serving", 0),
            progress.get("old", 0),
            datetime.fromisoformat(progress["time"]),
            progress.get("stay", 0),
        )
        if progress and "time" in progress
        else None,
        failures=tuple(
            Failure(one["group"], one["name"], one.get("revision", ""), datetime.fromisoformat(one["time"]))
            for one in status.get("recentFailures", ())
        ),
        given_up=GivenUp(
            given_up["revision"],
            given_up["spec"],
            tuple(given_up.get("groups", ())),
            given_up["reason"],
            given_up["message"],
            given_up.get("wanted", 0),
        )
        if given_up
        else None,
    )
