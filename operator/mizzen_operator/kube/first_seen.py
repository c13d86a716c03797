# SPDX-License-Identifier: Apache-2.0
"""Ages of objects on this process's monotonic clock.

The clock of another machine, such as the API server's, may differ from ours by minutes. So a wait that begins
with the creation of an object is measured from the time at which this process first saw the object.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from mizzen_operator.api.key import ServiceKey


class FirstSeen:
    """Times at which this process first saw objects of each service.

    A new leader knows none of these times, so a wait may last longer after a change of leader, never shorter.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Measure ages with `clock`, which returns the monotonic time in seconds."""
        self._clock = clock
        self._times: dict[ServiceKey, dict[str, float]] = {}

    def ages(self, key: ServiceKey, uids: Iterable[str]) -> Mapping[str, float]:
        """Return the seconds since each of a service's objects was first seen; drop all other objects.

        Args:
            key: the service's key.
            uids: uids of all objects of the service that exist now.
        """
        now, known = self._clock(), self._times.get(key, {})
        times = self._times[key] = {uid: known.get(uid, now) for uid in uids}
        return {uid: now - time for uid, time in times.items()}

    def forget(self, key: ServiceKey) -> None:
        """Drop the objects of a deleted service."""
        self._times.pop(key, None)
