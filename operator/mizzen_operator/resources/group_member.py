# SPDX-License-Identifier: Apache-2.0
"""Identity of one pod of a group: its name and labels."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen_operator.api import child_names, labels


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One pod of a group.

    Attributes:
        leader: name of the group's leading pod.
        rank: rank of the pod in its group; 0 is the leading pod.
    """

    revision: str
    group: int
    attempt: int
    leader: str
    rank: int = 0

    @property
    def name(self) -> str:
        """Name of the pod."""
        return child_names.worker_pod(self.leader, self.rank) if self.rank else self.leader

    @property
    def labels(self) -> dict[str, str]:
        """Labels that identify the group: all of its pods have them, and no other pods do."""
        return {
            labels.GROUP_INDEX: str(self.group),
            labels.REVISION: self.revision,
            labels.INCARNATION: str(self.attempt),
        }
