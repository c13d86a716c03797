# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: rank 0 schedules and samples; the other ranks (followers) run the same plans.

All ranks launch the same plans in the same order, so their collectives match. Only rank 0 knows the sampled
tokens, and broadcasts the last token of each slot at the start of every step with decodes. So ranks cannot
disagree about tokens, and penalties, grammars and log probabilities exist on rank 0 only.
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
"""Maximum time that a follower waits for a plan before it signals its heartbeat again."""
CPU_POLL_SECONDS = 0.0005
"""Pause between two checks for failed ranks while rank 0 waits for a step on CPU; no pause on CUDA."""
FAILED_RANK_SECONDS = 1.0
"""Time for which rank 0 checks, after a failed step, whether another rank failed and caused the error."""
MAX_FOLLOWER_STEPS = 8
"""Maximum number of steps in flight on a follower.

It must be lower than `BUFFERS` of the graphs, and not lower than the maximum of `steps_in_flight`."""


class PlanSender(Protocol):
    """Sends plans from rank 0 to the followers."""

    def send(self, plan: StepPlan) -> None:
        """Send a plan to all followers."""
        ...

    def end(self) -> None:
        """Signal to all followers that no more plans will be sent."""
        ...


class PlanReceiver(Protocol):
    """Receives plans from rank 0, on a follower."""

    @property
    def ended(self) -> bool:
        """Whether rank 0 has signalled that it sends no more plans."""
        ...

    def receive(self, seconds: float) -> StepPlan | None:
        """Return the next plan, or None if none arrives within `seconds` or no more plans will be sent."""
        ...


class Heartbeat(Protocol):
    """Records a rank's progress for the processes that monitor the ranks."""

    def ping(self) -> None:
        """Record that the loop of the rank is running."""
        ...

    def launched(self, step: int) -> None:
        """Record that a step was launched."""
        ...

    def done(self, step: int) -> None:
        """Record that a step is complete."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerRanks:
    """Rank 0's connections to the followers."""

    join_group: Callable[[], RankGroup]
    """Waits for all ranks and returns their process group."""
    plans: PlanSender
    heartbeat: Heartbeat
    """Heartbeat of rank 0."""
    raise_if_rank_failed: Callable[[], None] | None = None
    """Raises an error if a follower has failed; rank 0 calls it while it waits for a step. If None, another
    process must watch the ranks and end this process."""
    launch_guard: AbstractContextManager[None] = field(default_factory=nullcontext)
    """Context manager around each launch; it handles launches that block because a follower is gone."""

    def make_runner(self, runner: Runner, group: RankGroup) -> LeaderRunner:
        """Wrap rank 0's runner so that its plans also go to the followers; call it after warm-up."""
        poll_seconds = 0.0 if group.config.device.type == "cuda" else CPU_POLL_SECONDS
        return LeaderRunner(runner, group, self, poll_seconds)


class LeaderRunner:
    """Rank 0's runner: sends each plan to the followers before launching it, so all ranks start together."""

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
        """Wait for the oldest step in flight, while checking for failed followers."""
        try:
            while not self._runner.ready():
                check()
                time.sleep(self._poll_seconds)
            return self._runner.collect()
        except Exception:
            self._failed = True
            # If a follower died, this rank may see a closed connection first. The follower's own error names
            # the cause, so wait for it.
            end = time.monotonic() + FAILED_RANK_SECONDS
            while time.monotonic() < end:
                check()
                time.sleep(FAILED_RANK_SECONDS / 20)
            raise

    def close(self) -> None:
        """Stop the followers, wait for the steps in flight and free the device."""
        self._followers.plans.end()
        if self._failed:
            return  # the steps in flight may never be complete
        self._runner.close()
        self._group.close()


class FollowerRunner:
    """Runs the plans that rank 0 sends to a follower."""

    def __init__(self, runner: Runner, group: RankGroup | None) -> None:
        self._runner = runner
        self._group = group

    def run_plans(self, plans: PlanReceiver, heartbeat: Heartbeat) -> None:
        """Run plans until rank 0 sends no more.

        Raises:
            Exception: A step failed, or a received message is not a plan.
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
