"""What the planner is asked for, and what it answers with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the spec asks for.

    Attributes:
        groups: number of groups; 0 while the service is suspended.
        revision: what they should run.
        stable: the revision that served last with all its groups; empty when none did.
        restorable: the stable revision is known well enough to make groups of it.
        surge: groups beyond `groups` that may be there.
        unavailable: groups that may be missing; not 0 when `surge` is.
        partition: old groups that stay.
        paused: no new group is made and no old one retired for the sake of the rollout.
        given_up: numbers of new groups that failed too often.
        verification: name of the golden prompts of new groups; empty without any.
        refused: a new group failed them before the revision ever served.
        keep_refused: leave everything as it is then.
    """

    service: str
    groups: int
    revision: str
    stable: str = ""
    restorable: bool = False
    surge: int = 1
    unavailable: int = 0
    partition: int = 0
    paused: bool = False
    given_up: frozenset[int] = frozenset()
    verification: str = ""
    refused: bool = False
    keep_refused: bool = False

    @property
    def failed(self) -> bool:
        """Groups of the revision were given up or refused."""
        return self.refused or bool(self.given_up)

    @property
    def enough(self) -> int:
        """Groups that shall serve at any time."""
        return max(0, self.groups - self.unavailable)


@dataclass(frozen=True, slots=True)
class CreateGroup:
    """Make a group.

    Attributes:
        name: of its leading pod.
        ranks: which of its pods to make; all when empty.
    """

    name: str
    group: int
    revision: str
    incarnation: int
    reason: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeleteGroup:
    """Delete a group; it drains within the grace period of its pods.

    Attributes:
        pods: names and uids of those of its pods to delete.
    """

    name: str
    uid: str
    reason: str
    pods: tuple[tuple[str, str], ...]


Action = CreateGroup | DeleteGroup


def without_new(actions: Sequence[Action], revision: str) -> list[Action]:
    """Of a plan all but the groups that it would make of a revision."""
    return [one for one in actions if not (isinstance(one, CreateGroup) and one.revision == revision)]


def strays(pods: Sequence[tuple[str, str]]) -> list[DeleteGroup]:
    """What becomes of engine pods, by name and uid, of which nothing tells any more what they are."""
    return [DeleteGroup(name, uid, "Stray", ((name, uid),)) for name, uid in pods]
