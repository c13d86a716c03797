# SPDX-License-Identifier: Apache-2.0
"""Prefix-aware routing compared with round-robin, with one and with several independent gateways.

    python benchmarks/routing.py --json

Each engine is a process with the real wire, scheduler and radix cache, but with a simulated device that takes
`--step-milliseconds` per step and `--prefill-microseconds` per prompt token. The gateways are real routing
tables and dispatchers in this process, without HTTP. The trace consists of conversations of several turns.
Each conversation starts with one of a few system prompts, whose popularity follows Zipf's law. The prompt of
a turn contains all previous turns and the engine's answers. With several gateways, each turn goes to a random
gateway, so a conversation finds its cached prefix only if all gateways route it to the same engine.

Every policy runs the same conversations on engines with empty caches. All caches together can hold the whole
trace once, but not twice. The results are:

    hit           share of prompt tokens that came from caches
    of possible   the same tokens, as a share of the prompt tokens in whole pages of earlier requests
    ttft          time from placing a request to its first token
    load          outstanding tokens of the most loaded engine, averaged over time, as a multiple of the mean
                  of all engines (goal: at most 1.5)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mizzen.common.options import flag
from mizzen.core.sampling_params import SamplingParams
from mizzen.gateway.admission.admission import Admission
from mizzen.gateway.admission.queue_entry import QueueEntry
from mizzen.gateway.engines.discovered_engine import DiscoveredEngine
from mizzen.gateway.engines.engine_table import EngineTable
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.routed_request import RoutedRequest
from mizzen.gateway.routing.dispatcher import Dispatcher
from mizzen.gateway.routing.interfaces import Candidate
from mizzen.gateway.routing.router import Router, default_router
from mizzen.gateway.routing.scorers import CompatibleFilter, ServingFilter
from mizzen.gateway.telemetry.metrics import Metrics

MODEL = Path(__file__).parents[1] / "models" / "demo"
PAGE = 16
VOCABULARY = range(10, 1000)
SAMPLE_SECONDS = 0.02
PATIENCE_SECONDS = 300.0
MAX_LOAD = 1.5


class RoundRobin:
    """Picker that selects the engines in turn, regardless of their caches."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, scores: Sequence[float], engines: Sequence[Candidate]) -> int:
        """Return the index of the next engine; see `mizzen.gateway.routing.interfaces.Picker`."""
        self._turn += 1
        return self._turn % len(engines)


@dataclass(slots=True)
class Conversation:
    """Conversation of one user, as token ids."""

    start: float
    """Start in seconds after the beginning of the trace."""
    history: list[int]
    """Tokens of the system prompt."""
    turns: list[list[int]]
    """Tokens of the user's message in each turn."""
    pauses: list[float]
    """Seconds of pause after each turn."""


@dataclass(slots=True)
class RunCounts:
    """Tokens, latencies and loads of one run."""

    prompt: int = 0
    cached: int = 0
    possible: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    loads: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def count_reusable(self, tokens: list[int]) -> None:
        """Count the prompt tokens in whole pages of earlier requests; remember the prompt's pages."""
        key, new = (), False
        for end in range(PAGE, len(tokens), PAGE):
            key = (hash((key, *tokens[end - PAGE : end])),)
            new = new or key not in self.seen
            self.possible += 0 if new else PAGE
            self.seen.add(key)

    def remember(self, tokens: list[int]) -> None:
        """Remember the pages of a prompt and its answer, because later requests could reuse them."""
        key = ()
        for end in range(PAGE, len(tokens), PAGE):
            key = (hash((key, *tokens[end - PAGE : end])),)
            self.seen.add(key)


def make_trace(args: argparse.Namespace, seed: int) -> list[Conversation]:
    """Return the random conversations of a run, which are the same for equal seeds."""
    rng = random.Random(seed)

    def text(tokens: int) -> list[int]:
        return rng.choices(VOCABULARY, k=tokens)

    prompts = [text(args.shared_tokens) for _ in range(args.groups)]
    weights = [1 / (rank + 1) for rank in range(args.groups)]
    return [
        Conversation(
            start=rng.uniform(0, args.seconds * 0.5),
            history=list(rng.choices(prompts, weights)[0]),
            turns=[text(rng.randint(20, 2 * args.user_tokens - 20)) for _ in range(args.turns)],
            pauses=[rng.expovariate(2 * args.turns / args.seconds) for _ in range(args.turns)],
        )
        for _ in range(args.conversations)
    ]


@contextlib.contextmanager
def engines(args: argparse.Namespace) -> Iterator[list[str]]:
    """Run simulated engines in processes, and provide their endpoints."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        endpoints = []
        for number in range(args.engines):
            endpoints.append(f"ipc://{folder}/engine-{number}")
            options = {
                "model": MODEL,
                "served_name": "demo",
                "revision": "r",
                "wire_bind": endpoints[-1],
                "http_port": 0,
                "context_length": 8192,
                "page_size": PAGE,
                "kv_cache_tokens": args.kv_tokens,
                "step_milliseconds": args.step_milliseconds,
                "prefill_token_microseconds": args.prefill_microseconds,
                "drain_timeout_seconds": 0,
            }
            words = [word for name, value in options.items() for word in (flag(name), str(value))]
            process = subprocess.Popen(
                [sys.executable, "-m", "mizzen.server.simulate", *words], stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
        yield endpoints


@contextlib.asynccontextmanager
async def gateway(endpoints: list[str], router: Router, name: str) -> AsyncIterator[tuple[EngineTable, Any]]:
    """Run the routing table and the dispatcher of one gateway, connected to all engines."""
    table = EngineTable(
        gateway=name,
        keys=None,
        timeout_seconds=30,
        lost_seconds=60,
        on_change=lambda: admission.admit_waiting(),
    )
    admission = Admission(table.capacity, max_in_flight=10_000, queue_size=10_000)
    table.sync(DiscoveredEngine(name=f"engine-{i}", uid="", endpoint=url) for i, url in enumerate(endpoints))
    async with asyncio.timeout(120):
        while sum(engine.serving for engine in table) < len(endpoints):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    try:
        yield table, Dispatcher(table, admission, router, Metrics(), 3)
    finally:
        await table.close()


async def one_turn(dispatcher: Dispatcher, prompt: list[int], most: int, counts: RunCounts) -> list[int]:
    """Send a prompt, and return the tokens of the answer; `most` is their maximum number."""
    sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    generation = GenerationRequest(
        model="demo", sampling=sampling, prompt=array("i", prompt), max_tokens_given=True
    )
    routed = RoutedRequest(generation=generation, queue_entry=QueueEntry(time.monotonic() + PATIENCE_SECONDS))
    counts.count_reusable(prompt)
    began = time.monotonic()
    attempt = await dispatcher.place(routed)
    counts.first_token_seconds.append(time.monotonic() - began)
    try:
        finish = None
        while finish is None:
            _, finish = await attempt.next_tokens()
    finally:
        attempt.close()
        dispatcher.finish(routed)
    counts.prompt += len(prompt)
    counts.cached += finish.cached_tokens
    return list(routed.generated)


async def converse(
    conversation: Conversation,
    dispatchers: list[Dispatcher],
    args: argparse.Namespace,
    rng: random.Random,
    counts: RunCounts,
) -> None:
    """Run a conversation; each turn goes to a random gateway."""
    await asyncio.sleep(conversation.start)
    history = list(conversation.history)
    for message, pause in zip(conversation.turns, conversation.pauses, strict=True):
        history += message
        history += await one_turn(rng.choice(dispatchers), history, args.answer_tokens, counts)
        counts.remember(history)
        await asyncio.sleep(pause)


@contextlib.asynccontextmanager
async def sample_loads(tables: list[EngineTable], counts: RunCounts) -> AsyncIterator[None]:
    """Sample each engine's outstanding tokens regularly inside the context, and add them up in `counts`."""

    async def sample() -> None:
        while True:
            for table in tables:
                for engine in table:
                    counts.loads[engine.name] = counts.loads.get(engine.name, 0.0) + engine.tokens_in_flight
            counts.samples += 1
            await asyncio.sleep(SAMPLE_SECONDS)

    task = asyncio.create_task(sample())
    try:
        yield
    finally:
        task.cancel()


def new_router(policy: str, args: argparse.Namespace) -> Router:
    """Return a router with the given policy: "round-robin" or Mizzen's own."""
    if policy == "round-robin":
        return Router((ServingFilter(), CompatibleFilter()), (), (), RoundRobin())
    return default_router(args.load_factor_percent)


async def run(policy: str, replicas: int, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run the trace once with `replicas` gateways, and return the figures."""
    counts, rng = RunCounts(), random.Random(seed)
    with engines(args) as endpoints:
        async with contextlib.AsyncExitStack() as stack:
            pairs = [
                await stack.enter_async_context(gateway(endpoints, new_router(policy, args), f"gateway-{i}"))
                for i in range(replicas)
            ]
            await stack.enter_async_context(sample_loads([table for table, _ in pairs], counts))
            conversations = [
                converse(conversation, [dispatcher for _, dispatcher in pairs], args, rng, counts)
                for conversation in make_trace(args, seed)
            ]
            began = time.monotonic()
            await asyncio.gather(*conversations)
            seconds = time.monotonic() - began
    times = sorted(counts.first_token_seconds)
    return {
        "requests": len(times),
        "prompt_tokens": counts.prompt,
        "cached_tokens": counts.cached,
        "hit": counts.cached / counts.prompt,
        "of_possible": counts.cached / counts.possible,
        "ttft_ms_mean": 1e3 * statistics.mean(times),
        "ttft_ms_p50": 1e3 * statistics.median(times),
        "ttft_ms_p95": 1e3 * times[int(0.95 * len(times))],
        "mean_load_tokens": statistics.mean(counts.loads.values()) / counts.samples,
        "max_over_mean_load": max(counts.loads.values()) / statistics.mean(counts.loads.values()),
        "seconds": seconds,
    }


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure over all runs, except that the load is the maximum over all runs."""
    result = {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}
    result["max_over_mean_load"] = round(max(run["max_over_mean_load"] for run in runs), 3)
    return result


def main() -> int:
    """Run all policies and print their figures; return 1 if the load of an engine exceeds the goal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--gateways", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--conversations", type=int, default=96)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--groups", type=int, default=8, help="number of different system prompts")
    parser.add_argument("--shared-tokens", type=int, default=512, help="tokens of each system prompt")
    parser.add_argument(
        "--user-tokens", type=int, default=80, help="mean number of tokens in a user's message"
    )
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=30.0, help="approximate duration of the trace")
    parser.add_argument("--kv-tokens", type=int, default=40_960, help="tokens in the KV cache of each engine")
    parser.add_argument("--step-milliseconds", type=float, default=20.0)
    parser.add_argument(
        "--prefill-microseconds", type=float, default=100.0, help="prefill time of a prompt token"
    )
    parser.add_argument("--load-factor-percent", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    policies = [("round-robin", 1), *(("mizzen", count) for count in args.gateways)]
    results: dict[str, dict[str, Any]] = {}
    print(
        f"{'policy':14} {'gateways':>8} {'hit':>7} {'of possible':>12} {'ttft p50':>9} {'p95':>9} {'load':>6}"
    )
    for policy, replicas in policies:
        runs = [asyncio.run(run(policy, replicas, args, seed)) for seed in range(args.rounds)]
        key = policy if policy == "round-robin" else f"gateways_{replicas}"
        figures = results[key] = median(runs)
        print(
            f"{policy:14} {replicas:8} {figures['hit']:7.1%} {figures['of_possible']:12.1%}"
            f" {figures['ttft_ms_p50']:6.0f} ms {figures['ttft_ms_p95']:6.0f} ms"
            f" {figures['max_over_mean_load']:5.2f}x",
            flush=True,
        )
    loads = [figures["max_over_mean_load"] for key, figures in results.items() if key != "round-robin"]
    good = not loads or max(loads) <= MAX_LOAD
    print(f"load of the most loaded engine: {'' if good else 'above '}{MAX_LOAD}x the mean is the limit")
    if args.json:
        print(json.dumps(results))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
