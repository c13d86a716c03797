"""MODULE."""

from __future__ import annotations

from dataclasses import dataclass
from mizzen_operator.api import child_names
from mizzen_operator.api import labels


@dataclass(frozen=True, slots=True)
class Place:
    """Which pod of which group one is.

    Attributes:
        leader: name of the group's leading pod.
        rank: 0 of the leading one.
    """

    revision: str
    group: int
    incarnation: int
    leader: str
    rank: int = 0

    @property
    def name(self) -> str:
        """Name of the pod."""
        return child_names.worker_pod(self.leader, self.rank) if self.rank else self.leader

    @property
    def labels(self) -> dict[str, str]:
        """Labels that all pods of the group have, and no others."""
        return {
            labels.GROUP_INDEX: str(self.group),
            labels.REVISION: self.revision,
            labels.INCARNATION: str(self.incarnation),
        }
