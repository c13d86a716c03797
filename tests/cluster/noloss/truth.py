# SPDX-License-Identifier: Apache-2.0
"""Compare the condition Available of a service with probes that show whether the service works.

A probe is a small request through the gateway with a short deadline; probes are sent at fixed intervals, even
while earlier ones are pending. A failed probe shows that the service did not work when the probe was *sent*.
A successful probe shows that the service worked when its answer *came*, because the gateway may have held it
until an engine had started. If two consecutive probes agree, the service is taken to have been in that state
between them; if they differ, its state in between is unknown. So if one of several engines hangs and gets
some of the requests, failures and successes alternate, and no interval is long.

The status is *wrong* while the condition that a watch reported last differs from the state of the service.
`WrongStatus.allowed` limits the duration, and `MachineStrain` relaxes the limit on a machine without a free
core.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

ENDED_SECONDS, HUNG_SECONDS = 1.0, 3.0
"""Longest time in seconds for which a status may be wrong after a process has ended, or has begun to hang."""
API_FAULTS_SECONDS = 20.0
"""Longest time in seconds for which a status may be wrong while the API server is faulty.

Writes are then retried with back-off, and watches that were cut restart.
"""
CAUSE_SECONDS = 20.0
"""A fault does not count as the cause of a wrong status that began more than this many seconds later."""
EARLY_SECONDS = 0.5
"""A fault may be the cause of a wrong status that began up to this many seconds before the fault.

The reason: a probe may be sent before the fault and still fail because of it.
"""


@dataclass(frozen=True, slots=True)
class Probe:
    """When a probe was sent and ended (monotonic clock, in seconds); `good` if it was answered in time."""

    sent: float
    ended: float
    good: bool

    @property
    def sample(self) -> tuple[float, bool]:
        """The time at which the probe shows the state of the service, and whether the service worked then."""
        return (self.ended if self.good else self.sent, self.good)


@dataclass(frozen=True, slots=True)
class ObservedStatus:
    """The value of the condition Available since the time `at`; None if the service had no such condition."""

    at: float
    available: bool | None


@dataclass(frozen=True, slots=True)
class Fault:
    """A process fault (`ended` or `hung`), or the start (`api_faults`) or end (`api_well`) of API faults."""

    at: float
    kind: str


@dataclass(frozen=True, slots=True)
class WrongStatus:
    """An interval in which Available was wrong, its value, and the kind of the fault that caused it."""

    begin: float
    end: float
    available: bool
    cause: str = "none"

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.begin

    @property
    def allowed(self) -> float:
        """The longest allowed duration in seconds on a machine that has a free core."""
        if self.cause == "api_faults":
            return API_FAULTS_SECONDS
        return HUNG_SECONDS if self.available and self.cause == "hung" else ENDED_SECONDS


def find_intervals(probes: Iterable[Probe]) -> list[tuple[float, float, bool]]:
    """Return begin, end and state of the intervals between equal consecutive probes."""
    intervals: list[tuple[float, float, bool]] = []
    for at, good in sorted(probe.sample for probe in probes):
        if intervals and intervals[-1][2] == good:
            intervals[-1] = (intervals[-1][0], at, good)
        else:
            intervals.append((at, at, good))
    return intervals


def find_wrong_statuses(
    probes: Iterable[Probe], observed: Sequence[ObservedStatus], faults: Sequence[Fault]
) -> list[WrongStatus]:
    """Return the intervals in which the status was wrong, in order, each with its probable cause."""
    wrong_statuses: list[WrongStatus] = []
    intervals = find_intervals(probes)
    for index, status in enumerate(observed):
        if status.available is None:
            continue
        until = observed[index + 1].at if index + 1 < len(observed) else float("inf")
        for begin, end, good in intervals:
            begin, end = max(begin, status.at), min(end, until)
            if good is not status.available and begin < end:
                wrong_statuses.append(WrongStatus(begin, end, status.available, find_cause(begin, faults)))
    return sorted(wrong_statuses, key=lambda wrong: wrong.begin)


def find_cause(begin: float, faults: Sequence[Fault]) -> str:
    """Return the kind of the latest fault that may explain why a status was wrong from `begin` on, or "none".

    Faults of the API server take precedence, from `api_faults` until CAUSE_SECONDS after `api_well`.
    """
    api_faults = [
        fault
        for fault in faults
        if fault.kind in ("api_faults", "api_well") and fault.at <= begin + EARLY_SECONDS
    ]
    if api_faults and (api_faults[-1].kind == "api_faults" or begin - api_faults[-1].at < CAUSE_SECONDS):
        return "api_faults"
    recent = [fault for fault in faults if begin - CAUSE_SECONDS <= fault.at <= begin + EARLY_SECONDS]
    return max(recent, key=lambda fault: fault.at).kind if recent else "none"


@dataclass(frozen=True, slots=True)
class MachineSample:
    """A sample of the machine's load at the time `at`.

    `late` is the delay in seconds with which the sampling task woke up; `idle` is the share of idle core time
    since the previous sample.
    """

    at: float
    late: float
    idle: float


STARVED_IDLE = 0.25
"""Share of idle core time below which processes wait for a core."""
STARVED_FACTOR = 10.0
"""Factor by which a delay is added to a limit, and by which a lack of idle cores multiplies the limit.

Between the end of an engine and the watch event, processes are scheduled about this number of times.
"""


class MachineStrain:
    """Relaxes limits by the delays that were measured on the machine."""

    def __init__(self, machine_samples: Sequence[MachineSample]) -> None:
        self._samples = machine_samples

    def allowed(self, wrong: WrongStatus) -> float:
        """Return how many seconds this status was allowed to be wrong on this machine."""
        return self.relaxed_limit(wrong.allowed, wrong.begin - 1, wrong.end + 1)

    def relaxed_limit(self, strict: float, begin: float, end: float) -> float:
        """Return the relaxed limit, in seconds, of an event between `begin` and `end`.

        The relaxed limit is `strict` plus STARVED_FACTOR times the longest delay of a machine sample between
        `begin` and `end`. If the average share of idle core time was below STARVED_IDLE, the relaxed limit is
        at least STARVED_FACTOR times `strict`.
        """
        near = [sample for sample in self._samples if begin <= sample.at <= end]
        late = max((sample.late for sample in near), default=0.0)
        idle = sum(sample.idle for sample in near) / len(near) if near else 1.0
        limit = strict + STARVED_FACTOR * late
        return max(limit, STARVED_FACTOR * strict) if idle < STARVED_IDLE else limit


def summary(wrong_statuses: Iterable[WrongStatus]) -> dict[str, Any]:
    """Return a summary of the wrong statuses for each cause and value of the condition Available.

    Each summary contains the number of wrong statuses, their longest duration and their limit in seconds, and
    how many of them exceeded the limit.
    """
    kinds: dict[str, list[WrongStatus]] = {}
    for wrong in wrong_statuses:
        said = "said_available" if wrong.available else "said_unavailable"
        kinds.setdefault(f"{wrong.cause}_{said}", []).append(wrong)
    return {
        kind: {
            "times": len(all_of_kind),
            "longest_s": round(max(wrong.seconds for wrong in all_of_kind), 3),
            "over": sum(wrong.seconds > wrong.allowed for wrong in all_of_kind),
            "allowed_s": all_of_kind[0].allowed,
        }
        for kind, all_of_kind in sorted(kinds.items())
    }
