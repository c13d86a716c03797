# SPDX-License-Identifier: Apache-2.0
"""Remembers how admission plugins change children, so that the operator does not undo their changes.

An admission plugin may change a manifest whenever the operator applies it: clusters that set resources
themselves do so, and so do policies that stamp annotations. To apply the manifest again would change nothing,
or the plugin would change it back each time. So the fields that differ from the manifest right after a write
are left as they are. Fields that others change later are corrected, at a limited rate.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.kube.drift import changed_fields, extra_fields

CORRECTIONS_AT_ONCE = 10
"""Number of corrections of one object that need not wait."""
SECONDS_PER_CORRECTION = 60.0
"""Time between two corrections of an object that others keep changing."""
MAX_REMEMBERED = 16384
"""Number of objects that are remembered; a forgotten one is corrected once more."""


@dataclass(frozen=True, slots=True)
class Differences:
    """Fields in which a live object differs from its manifest.

    Attributes:
        applied: hash of the manifest.
        changed: digest of the live value of each field of the manifest that differs, by path.
        extra: digest of each field that others added, by path.
    """

    applied: str
    changed: Mapping[str, str]
    extra: Mapping[str, str]

    @property
    def paths(self) -> list[str]:
        """Paths of all fields that differ; sorted."""
        return sorted({*self.changed, *self.extra})


def compare(live: Mapping[str, Any], manifest: Mapping[str, Any]) -> Differences:
    """Return the fields in which a live object differs from its manifest."""
    applied = manifest["metadata"]["annotations"][labels.APPLIED_HASH]
    return Differences(applied, changed_fields(live, manifest), extra_fields(live, manifest))


@dataclass(slots=True)
class _Known:
    """Differences of an object right after our last write, and the corrections that need not wait."""

    left: Differences
    corrections: float
    refilled_at: float
    reported: set[str] = field(default_factory=set[str])
    """Paths of the fields that were reported."""


class AdmissionChanges:
    """The differences that remained after the last write of each child, by the child's uid."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create an empty memory; `clock` returns the monotonic time in seconds."""
        self._clock = clock
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def is_left(self, uid: str, found: Differences) -> bool:
        """Return whether all differences of an object remained after our last write of this manifest."""
        known = self._known.get(uid)
        return (
            known is not None
            and known.left.applied == found.applied
            and found.changed.items() <= known.left.changed.items()
            and self.is_extra_left(uid, found)
        )

    def is_extra_left(self, uid: str, found: Differences) -> bool:
        """Return whether all fields that others added to an object remained after our last write."""
        known = self._known.get(uid)
        extra = known.left.extra if known is not None else {}
        return found.extra.items() <= extra.items()

    def may_correct(self, uid: str, applied: str) -> bool:
        """Return whether an object may be written now.

        A manifest with a new hash is always written. The same manifest is written again at once for
        `CORRECTIONS_AT_ONCE` times, and then every `SECONDS_PER_CORRECTION`.
        """
        known = self._remember(uid, Differences(applied, {}, {}))
        if known.left.applied != applied:
            return True
        now = self._clock()
        refilled = (now - known.refilled_at) / SECONDS_PER_CORRECTION
        known.corrections, known.refilled_at = min(CORRECTIONS_AT_ONCE, known.corrections + refilled), now
        if known.corrections < 1:
            return False
        known.corrections -= 1
        return True

    def record(self, uid: str, left: Differences) -> list[str]:
        """Record the differences that remained after a write; return the paths not yet reported."""
        if uid not in self._known and not left.paths:
            return []
        known = self._remember(uid, left)
        known.left = left
        new = [path for path in left.paths if path not in known.reported]
        known.reported.update(new)
        return new

    def _remember(self, uid: str, left: Differences) -> _Known:
        """Return the entry of an object; create it with these differences if it is missing."""
        known = self._known.setdefault(uid, _Known(left, CORRECTIONS_AT_ONCE, self._clock()))
        self._known.move_to_end(uid)
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        return known
