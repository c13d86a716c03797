"""One model on several ranks: rank 0 plans and draws tokens, the others run the same plans beside it.

All ranks launch the same plans in the same order, so that their collectives meet. What a step draws is known
on rank 0 alone: it hands its last tokens to the others on the device, at the beginning of every step that
decodes. Ranks thus cannot disagree, and penalties, grammars and log probabilities are rank 0's alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from mizzen.core.step_plan import Runner, StepPlan, StepTokens
from mizzen.parallel.process_group import Group

WAIT_SECONDS = 0.5
"""A rank that has nothing to do shows this often that it is alive."""
CPU_NAP_SECONDS = 0.0005
BLAME_SECONDS = 1.0
IN_FLIGHT = 8
"""Steps that other ranks have launched at most: less than buffers of graphs, and no less than rank 0."""


class PlanSender(Protocol):
    """Rank 0's end of the plan channel."""

    def send(self, plan: StepPlan) -> None:
        """Hand a plan to all other ranks."""
        ...

    def end(self) -> None:
        """Tell them that nothing more comes."""
        ...


class PlanReceiver(Protocol):
    """Another rank's end."""

    @property
    def ended(self) -> bool:
        """Tell whether nothing more comes."""
        ...

    def receive(self, seconds: float) -> StepPlan | None:
        """Return the next plan; None when none came in time, or the end did."""
        ...


class Pulse(Protocol):
    """Where a rank shows how far it is, to whoever watches the ranks."""

    def beat(self) -> None:
        """Show that the rank's loop turns."""
        ...

    def launched(self, step: int) -> None:
        """Show that a step was launched."""
        ...

    def done(self, step: int) -> None:
        """Show that a step is complete."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """The other ranks, as rank 0 reaches them."""

    join: Callable[[], Group]
    """Meets them."""
    plans: PlanSender
    pulse: Pulse
    check: Callable[[], None] | None = None
    """Raises when another rank has failed. With it, rank 0 looks while it waits for a step; without it,
    somebody else ends this process then."""
    guard: AbstractContextManager[None] = field(default_factory=nullcontext)
    """Around each launch, which may never return once another rank is gone."""

    def over(self, runner: Runner, group: Group) -> LeadingRunner:
        """Put them behind a runner whose warm-up is over."""
        nap = 0.0 if group.place.device.type == "cuda" else CPU_NAP_SECONDS
        return LeadingRunner(runner, group, self, nap)


class LeadingRunner:
    """Rank 0's runner: every plan goes to the other ranks first, so that they start beside it."""

    def __init__(self, runner: Runner, group: Group, lead: Lead, nap_seconds: float) -> None:
        self._runner = runner
        self._group = group
        self._lead = lead
        self._nap = nap_seconds
        self._failed = False

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step on all ranks."""
        with self._lead.guard:
            self._lead.plans.send(plan)
            self._runner.launch(plan)
        self._lead.pulse.launched(plan.step)

    def ready(self) -> bool:
        """Tell whether `collect` would return without waiting."""
        return self._runner.ready()

    def collect(self) -> StepTokens:
        """Wait for the oldest step in flight and return its tokens."""
        check = self._lead.check
        tokens = self._runner.collect() if check is None else self._watched(check)
        self._lead.pulse.done(tokens.step)
        return tokens

    def _watched(self, check: Callable[[], None]) -> StepTokens:
        """Wait while looking after the others."""
        try:
            while not self._runner.ready():
                check()
                time.sleep(self._nap)
            return self._runner.collect()
        except Exception:
            self._failed = True
            # Where another rank died, this one may first hear of a closed connection: the other tells why.
            end = time.monotonic() + BLAME_SECONDS
            while time.monotonic() < end:
                check()
                time.sleep(BLAME_SECONDS / 20)
            raise

    def close(self) -> None:
        """Let the other ranks end, wait for what is in flight and free the device."""
        self._lead.plans.end()
        if self._failed:
            return  # what is in flight may never end
        self._runner.close()
        self._group.close()


class Follower:
    """Another rank than 0: runs plans as they come."""

    def __init__(self, runner: Runner, group: Group | None) -> None:
        self._runner = runner
        self._group = group

    def run(self, plans: PlanReceiver, pulse: Pulse) -> None:
        """Run until the end of plans, and wait for what is in flight.

        Raises:
            Exception: a step failed, or what came is no plan.
        """
        in_flight = 0
        while not plans.ended:
            pulse.beat()
            while in_flight and (in_flight >= IN_FLIGHT or self._runner.ready()):
                pulse.done(self._runner.collect().step)
                in_flight -= 1
            plan = plans.receive(WAIT_SECONDS)
            if plan is not None:
                self._runner.launch(plan)
                pulse.launched(plan.step)
                in_flight += 1

    def close(self) -> None:
        """Wait for what is in flight and free the device."""
        self._runner.close()
        if self._group:
            self._group.close()
