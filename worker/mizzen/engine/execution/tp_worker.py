"""Tensor parallelism: rank 0 plans and samples, the other ranks run the same plans alongside.

All ranks launch the same plans in the same order, so their collectives match. Only rank 0 knows the sampled
tokens; it broadcasts its last tokens on the device at the start of every step that decodes. Ranks therefore
cannot disagree, and penalties, grammars and log probabilities exist on rank 0 only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from mizzen.core.step_plan import Runner, StepPlan, StepTokens
from mizzen.parallel.process_group import RankGroup

PLAN_WAIT_SECONDS = 0.5
"""Longest wait of an idle rank for a plan before it signals its heartbeat."""
CPU_POLL_SECONDS = 0.0005
"""Pause between checks of rank 0 on CPU while it waits for a step; on CUDA it does not pause."""
FAILED_RANK_SECONDS = 1.0
"""Time after an error in which rank 0 looks for another rank whose failure caused it."""
MAX_FOLLOWER_STEPS = 8
"""Maximum steps in flight on a follower: fewer than the graphs' buffers, at least as many as on rank 0."""


class PlanSender(Protocol):
    """Rank 0's end of the plan channel."""

    def send(self, plan: StepPlan) -> None:
        """Send a plan to all other ranks."""
        ...

    def end(self) -> None:
        """Signal that no more plans follow."""
        ...


class PlanReceiver(Protocol):
    """A follower's end of the plan channel."""

    @property
    def ended(self) -> bool:
        """Return whether no more plans follow."""
        ...

    def receive(self, seconds: float) -> StepPlan | None:
        """Return the next plan; None after `seconds` without one, or at the end of the channel."""
        ...


class Heartbeat(Protocol):
    """Records a rank's progress for the processes that monitor the ranks."""

    def ping(self) -> None:
        """Record that the rank's loop is running."""
        ...

    def launched(self, step: int) -> None:
        """Record that a step was launched."""
        ...

    def done(self, step: int) -> None:
        """Record that a step completed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerRanks:
    """Rank 0's connections to the other ranks."""

    join_group: Callable[[], RankGroup]
    """Meets the other ranks and returns the process group."""
    plans: PlanSender
    heartbeat: Heartbeat
    raise_if_rank_failed: Callable[[], None] | None = None
    """Raises if another rank has failed. Rank 0 calls it while it waits for a step; without it, a monitor
    outside has to end this process.
    """
    launch_guard: AbstractContextManager[None] = field(default_factory=nullcontext)
    """Context of each launch, because a launch may never return once another rank is gone."""

    def make_runner(self, runner: Runner, group: RankGroup) -> LeaderRunner:
        """Wrap a warmed-up runner so that its plans also go to the other ranks."""
        poll_seconds = 0.0 if group.config.device.type == "cuda" else CPU_POLL_SECONDS
        return LeaderRunner(runner, group, self, poll_seconds)


class LeaderRunner:
    """Rank 0's runner: sends every plan to the other ranks first, so that all start together."""

    def __init__(
        self, runner: Runner, group: RankGroup, followers: FollowerRanks, poll_seconds: float
    ) -> None:
        self._runner = runner
        self._group = group
        self._followers = followers
        self._poll_seconds = poll_seconds
        self._failed = False

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step on all ranks."""
        with self._followers.launch_guard:
            self._followers.plans.send(plan)
            self._runner.launch(plan)
        self._followers.heartbeat.launched(plan.step)

    def ready(self) -> bool:
        """Return whether `collect` would return without waiting."""
        return self._runner.ready()

    def collect(self) -> StepTokens:
        """Wait for the oldest step in flight and return its tokens."""
        check = self._followers.raise_if_rank_failed
        tokens = self._runner.collect() if check is None else self._collect_watching(check)
        self._followers.heartbeat.done(tokens.step)
        return tokens

    def _collect_watching(self, check: Callable[[], None]) -> StepTokens:
        """Wait for the oldest step while checking that the other ranks are alive."""
        try:
            while not self._runner.ready():
                check()
                time.sleep(self._poll_seconds)
            return self._runner.collect()
        except Exception:
            self._failed = True
            # If another rank died, this one may see a closed connection first; the other's error says why.
            end = time.monotonic() + FAILED_RANK_SECONDS
            while time.monotonic() < end:
                check()
                time.sleep(FAILED_RANK_SECONDS / 20)
            raise

    def close(self) -> None:
        """Stop the other ranks, wait for the steps in flight and free the device."""
        self._followers.plans.end()
        if self._failed:
            return  # the steps in flight may never end
        self._runner.close()
        self._group.close()


class FollowerRunner:
    """Runs the plans that rank 0 sends, on any other rank."""

    def __init__(self, runner: Runner, group: RankGroup | None) -> None:
        self._runner = runner
        self._group = group

    def run_plans(self, plans: PlanReceiver, heartbeat: Heartbeat) -> None:
        """Run plans until the channel ends, then wait for the steps in flight.

        Raises:
            Exception: A step failed, or a message is not a plan.
        """
        inflight_steps = 0
        while not plans.ended:
            heartbeat.ping()
            while inflight_steps and (inflight_steps >= MAX_FOLLOWER_STEPS or self._runner.ready()):
                heartbeat.done(self._runner.collect().step)
                inflight_steps -= 1
            plan = plans.receive(PLAN_WAIT_SECONDS)
            if plan is not None:
                self._runner.launch(plan)
                heartbeat.launched(plan.step)
                inflight_steps += 1

    def close(self) -> None:
        """Wait for the steps in flight and free the device."""
        self._runner.close()
        if self._group:
            self._group.close()
