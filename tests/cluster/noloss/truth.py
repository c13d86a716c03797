"""Whether a status tells the truth: what a service does, held against what its condition Available says.

*Works* is sampled by probes: one small request at a time-table, through the gateway, with a short deadline,
however many are still under way. A probe that fails says that the service did not work when it was *sent*: a
request sent then got no answer. One that succeeds says that the service worked when its answer *came*: it may
have been held until then, for an engine that was just starting. Between two samples that agree the service is
taken to have been what both say; between two that differ nothing is known. So while an engine of several
hangs, and gets some of the requests, both kinds come in turn and no stretch is long.

*Available* is what a watch of the service brought last, when it arrived. The status is *wrong* where the two
differ. How long it may be: `allowed`. What a machine without a free core adds to that is measured (`Strain`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

ENDED_SECONDS, HUNG_SECONDS = 1.0, 3.0
"""How long a status may be wrong, most of all after a process ended, and after one hangs."""
API_FAULTS_SECONDS = 20.0
"""Where the API server fails: lost writes are tried again after pauses, and lost watches begin anew."""
CAUSE_SECONDS = 20.0
"""A fault this long ago is no longer taken for the cause."""
EARLY_SECONDS = 0.5
"""A probe that was under way when the fault came was sent this long before it at most."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe's times, in seconds of one clock, and whether it got its answer before its deadline."""

    sent: float
    ended: float
    good: bool

    @property
    def sample(self) -> tuple[float, bool]:
        """When it says what of the service."""
        return (self.ended if self.good else self.sent, self.good)


@dataclass(frozen=True, slots=True)
class Shown:
    """What the condition said from a time on; None when there was no condition."""

    at: float
    available: bool | None


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to a service: `ended` or `hung` for a process, or another word."""

    at: float
    kind: str


@dataclass(frozen=True, slots=True)
class Wrong:
    """A time in which the status was wrong, and what it said."""

    begin: float
    end: float
    available: bool
    cause: str = "none"

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.begin

    @property
    def allowed(self) -> float:
        """How long it may be on a machine that has a free core."""
        if self.cause == "api_faults":
            return API_FAULTS_SECONDS
        return HUNG_SECONDS if self.available and self.cause == "hung" else ENDED_SECONDS


def stretches(probes: Iterable[Probe]) -> list[tuple[float, float, bool]]:
    """Times in which the service was known to work, or not to: from the first to the last equal sample."""
    found: list[tuple[float, float, bool]] = []
    for at, good in sorted(probe.sample for probe in probes):
        if found and found[-1][2] == good:
            found[-1] = (found[-1][0], at, good)
        else:
            found.append((at, at, good))
    return found


def wrongs(probes: Iterable[Probe], shown: Sequence[Shown], faults: Sequence[Fault]) -> list[Wrong]:
    """Times in which the status was wrong, in order, each with the latest fault before it."""
    found: list[Wrong] = []
    known = stretches(probes)
    for index, one in enumerate(shown):
        if one.available is None:
            continue
        until = shown[index + 1].at if index + 1 < len(shown) else float("inf")
        for begin, end, good in known:
            begin, end = max(begin, one.at), min(end, until)
            if good is not one.available and begin < end:
                found.append(Wrong(begin, end, one.available, cause(begin, faults)))
    return sorted(found, key=lambda wrong: wrong.begin)


def cause(begin: float, faults: Sequence[Fault]) -> str:
    """The kind of the latest fault that can have made something wrong from then on.

    While the API server is faulty (`api_faults` until `api_well`, and CAUSE_SECONDS after), that is it.
    """
    server = [
        one for one in faults if one.kind in ("api_faults", "api_well") and one.at <= begin + EARLY_SECONDS
    ]
    if server and (server[-1].kind == "api_faults" or begin - server[-1].at < CAUSE_SECONDS):
        return "api_faults"
    able = [one for one in faults if begin - CAUSE_SECONDS <= one.at <= begin + EARLY_SECONDS]
    return max(able, key=lambda one: one.at).kind if able else "none"


@dataclass(frozen=True, slots=True)
class Beat:
    """A look at the machine: by how much it came late, and which share of all cores was idle before it."""

    at: float
    late: float
    idle: float


STARVED_IDLE = 0.25
"""With less of the cores idle, processes wait for their turn."""
STARVED_TIMES = 10.0
"""The chain from an engine's end to a watch's event has about so many turns of processes."""


class Strain:
    """What the machine adds to every delay."""

    def __init__(self, beats: Sequence[Beat]) -> None:
        self._beats = beats

    def allowed(self, wrong: Wrong) -> float:
        """How long a status may be wrong at that time."""
        return self.stretched(wrong.allowed, wrong.begin - 1, wrong.end + 1)

    def stretched(self, strict: float, begin: float, end: float) -> float:
        """How long something may take between two times.

        The strict figure, and STARVED_TIMES the longest time by which this process itself came late
        meanwhile; where less of the cores than STARVED_IDLE was idle, STARVED_TIMES the strict figure.
        """
        near = [beat for beat in self._beats if begin <= beat.at <= end]
        late = max((beat.late for beat in near), default=0.0)
        idle = sum(beat.idle for beat in near) / len(near) if near else 1.0
        most = strict + STARVED_TIMES * late
        return max(most, STARVED_TIMES * strict) if idle < STARVED_IDLE else most


def summary(found: Iterable[Wrong]) -> dict[str, Any]:
    """Of each cause and what the status said meanwhile: how many times, and the longest in seconds."""
    kinds: dict[str, list[Wrong]] = {}
    for wrong in found:
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
