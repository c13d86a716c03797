# SPDX-License-Identifier: Apache-2.0
"""Host time of a step in the real scheduler: the sum of `Scheduler.schedule` and `Scheduler.complete`.

A constant number of requests is running, each with about a thousand tokens. Stop tokens are checked, page
tables grow, finished requests enter the radix cache, and the cache evicts prefixes (in the order of
`--eviction`). With policies other than fcfs, further requests wait for a slot, half as many as are running.
With `priority`, one request in eight has a higher priority. `--all` measures every policy with lru, and every
eviction with fcfs. Times are CPU time of the thread: the scheduler never waits, and the time that other
processes take is not its cost. The columns are:

    quiet         decode steps while no request arrives or finishes
    decode        steps without prefill, while in each step 1 % of the requests finish and as many arrive (two
                  or three with 256 running)
    mixed         steps of the same run that prefill at least one prompt
    all           all steps of that run
    event         cost of one finished request and its successor's arrival, over all steps that they affect
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
from common_parts.arguments import Help, jsonable, positive
from numpy.typing import NDArray

from mizzen.core.config import SchedulerConfig
from mizzen.core.events import AddRequest
from mizzen.core.kv.eviction import STRATEGIES
from mizzen.core.policies import POLICIES
from mizzen.core.request import Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import StepPlan, StepTokens

GOAL = 40.0
SIZES = (1, 8, 32, 64, 128, 256, 512)
GOAL_SIZE = 256
VOCABULARY = 128_000
END_TOKENS = (0, 1)
CHURN = 0.01
COLUMNS = ("quiet", "quiet_p99", "decode", "decode_p99", "mixed", "all", "all_p99", "event")
WITH_GOAL = ("quiet", "decode")
LEAST_STEPS = 40
"""Minimum of `--steps` minus the number of running requests; each request takes one step to start."""


class Workload:
    """Generator of requests that share system prompts, and of their sampled tokens.

    In each step, a share `churn` of the requests ends with a stop token. Random numbers are generated in
    advance, so that generating them does not disturb the measurement.
    """

    def __init__(self, running: int, churn: float, steps: int) -> None:
        self._random = np.random.default_rng(running)
        self._systems = [self._tokens(512) for _ in range(8)]
        self._rid = 0
        self._sampled = self._random.integers(16, VOCABULARY, (steps, running), dtype=np.int32)
        self._sampled[self._random.random(self._sampled.shape) < churn] = END_TOKENS[0]
        self._requests = deque(self._make() for _ in range(int(running * (1 + 1.5 * churn * steps)) + 64))

    def request(self) -> Request:
        """Return a new request, whose prompt has a shared prefix of 512 tokens and 512 further tokens."""
        return self._requests.popleft() if self._requests else self._make()

    def _make(self) -> Request:
        self._rid += 1
        prompt = np.concatenate((self._systems[self._rid % 8], self._tokens(512)))
        stops = (7, 8) if self._rid % 2 else ()
        sampling = SamplingParams(max_tokens=3000, stop_token_ids=stops)
        return Request(rid=self._rid, prompt=prompt, sampling=sampling, priority=int(self._rid % 8 == 0))

    def sample(self, plan: StepPlan) -> StepTokens:
        """Return random sampled tokens for a step, with stop tokens for some of the decode rows."""
        tokens = self._sampled[plan.step % len(self._sampled)].copy()
        tokens[len(plan.decode) :] = 16
        return StepTokens(plan.step, tokens[: plan.samples].reshape(-1, 1))

    def _tokens(self, count: int) -> np.ndarray:
        return self._random.integers(16, VOCABULARY, count, dtype=np.int32)


def seconds(plan: StepPlan) -> float:
    """Return the seconds that a step would take on a GPU, from which the scheduler learns step times."""
    return 0.01 + 1e-5 * sum(len(chunk.tokens) for chunk in plan.prefill)


def run(
    running: int, page_size: int, steps: int, policy: str, eviction: str, churn: float = CHURN
) -> Iterator[tuple[float, bool, int]]:
    """Yield each measured step's microseconds, whether it had prefill, and how many requests it finished."""
    workload = Workload(running, churn, steps)
    scheduler = Scheduler(
        SchedulerConfig(
            pages_total=(running + 4) * 3072 // page_size,
            context_length=4096,
            page_size=page_size,
            max_running_requests=running + 16 if policy == "fcfs" else running,
            policy=policy,
            eviction=eviction,
            end_token_ids=END_TOKENS,
            max_step_milliseconds=50.0,
            steps_in_flight=2,
        )
    )
    now = 0.0
    waiting = 0 if policy == "fcfs" else max(running // 2, 1)
    events = [AddRequest(workload.request()) for _ in range(running + waiting)]
    in_flight: list[StepPlan] = []
    warm = steps // 4 + running // 8
    for number in range(steps):
        begin = time.thread_time()
        plan = scheduler.schedule(events, now)
        lap = time.thread_time() - begin
        events = []
        if plan is not None:
            in_flight.append(plan)
        if len(in_flight) < 2:
            continue
        oldest = in_flight.pop(0)
        tokens = workload.sample(oldest)
        now += seconds(oldest)
        begin = time.thread_time()
        output = scheduler.complete(tokens, now)
        lap += time.thread_time() - begin
        events = [AddRequest(workload.request()) for _ in output.finished]
        if number >= warm and plan is not None:
            yield lap * 1e6, bool(plan.prefill), len(output.finished)


def quantile(values: NDArray[np.float64], percent: float) -> float:
    """Return a percentile of `values`; NaN if there are no values."""
    return float(np.percentile(values, percent)) if len(values) else math.nan


def measure(running: int, page_size: int, steps: int, policy: str, eviction: str) -> dict[str, float]:
    """Return the columns of the table by name, in microseconds: medians, 99th percentiles, and `event`."""
    gc.collect()
    gc.freeze()
    calm = run(running, page_size, steps // 2, policy, eviction, churn=0.0)
    quiet = np.array([lap for lap, _, _ in calm])
    laps = list(run(running, page_size, steps, policy, eviction))
    gc.unfreeze()
    decode = np.array([lap for lap, mixed, _ in laps if not mixed])
    mixed = np.array([lap for lap, mixed, _ in laps if mixed])
    everything = np.array([lap for lap, _, _ in laps])
    finishes = sum(finished for _, _, finished in laps)
    return {
        "quiet": quantile(quiet, 50),
        "quiet_p99": quantile(quiet, 99),
        "decode": quantile(decode, 50),
        "decode_p99": quantile(decode, 99),
        "mixed": quantile(mixed, 50),
        "all": quantile(everything, 50),
        "all_p99": quantile(everything, 99),
        "event": float((everything.mean() - quiet.mean()) * len(everything) / max(finishes, 1)),
    }


def of_goal(figure: dict[str, float]) -> str:
    """Return a line with each time as a share of the goal, for the columns that have a goal."""
    cells = (f"{figure[key] / GOAL:.0%}" if key in WITH_GOAL else "" for key in COLUMNS)
    return (f"{'of goal':>8}" + "".join(f"{cell:>12}" for cell in cells)).rstrip()


def report(
    sizes: tuple[int, ...], steps: int, policy: str, eviction: str
) -> dict[str, dict[str, dict[str, float]]]:
    """Print the tables for page sizes 1 and 16, and return their figures."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for page_size in (1, 16):
        goal = f"the goal is {GOAL:.0f} at {GOAL_SIZE} running"
        print(f"{policy}, {eviction}, page size {page_size}: microseconds a step; {goal}")
        print(f"{'running':>8}" + "".join(f"{key:>12}" for key in COLUMNS))
        table: dict[str, dict[str, float]] = {f"{key}_us": {} for key in COLUMNS}
        for running in sizes:
            figure = measure(running, page_size, steps, policy, eviction)
            for key in COLUMNS:
                table[f"{key}_us"][str(running)] = round(figure[key], 2)
            print(f"{running:>8}" + "".join(f"{figure[key]:>12.1f}" for key in COLUMNS))
            if running == GOAL_SIZE:
                print(of_goal(figure))
        figures[f"page_size_{page_size}"] = table
    return figures


def runs_to_measure(policies: list[str], evictions: list[str], *, everything: bool) -> list[tuple[str, str]]:
    """Return the pairs of policy and eviction to measure: all pairs of the two lists.

    With `everything`, every policy is paired with lru and every eviction with fcfs instead.
    """
    if not everything:
        return [(policy, eviction) for policy in policies for eviction in evictions]
    others = [("fcfs", eviction) for eviction in STRATEGIES if eviction != "lru"]
    return [*((policy, "lru") for policy in POLICIES), *others]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument(
        "--sizes", type=positive, nargs="+", default=SIZES, help="numbers of running requests"
    )
    parser.add_argument(
        "--policy",
        choices=tuple(POLICIES),
        nargs="+",
        default=["fcfs"],
        help="order of waiting requests",
    )
    parser.add_argument(
        "--eviction",
        choices=tuple(STRATEGIES),
        nargs="+",
        default=["lru"],
        help="order in which cached prefixes are evicted",
    )
    parser.add_argument("--all", action="store_true", help="every policy with lru, every eviction with fcfs")
    parser.add_argument(
        "--steps", type=positive, default=3000, help="steps per size; the first quarter warms up"
    )
    options = parser.parse_args()
    if options.steps < (least := LEAST_STEPS + max(options.sizes)):
        parser.error(f"--steps {options.steps}: {max(options.sizes)} running requests need at least {least}")
    runs = runs_to_measure(options.policy, options.eviction, everything=options.all)
    results = {run: report(tuple(options.sizes), options.steps, *run) for run in runs}
    if options.json:
        figures = results[runs[0]]
        by_name = {f"{policy}, {eviction}": figure for (policy, eviction), figure in results.items()}
        print(json.dumps(jsonable({**figures["page_size_1"], **figures, "runs": by_name, "goal_us": GOAL})))


if __name__ == "__main__":
    main()
