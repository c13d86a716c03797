"""What routing by cached prefixes is worth beside round-robin, and how well gateways agree that do not talk.

    python benchmarks/routing.py --json

The engines are processes of their own with the real wire, scheduler and radix cache over a device that takes
`--step-milliseconds` a step and `--prefill-microseconds` a prompt token, and computes nothing. The gateways
are the real routing tables and dispatchers, without HTTP, in this process. The trace is conversations of
several turns: each begins with one of a few system prompts, which they share by Zipf's law, and each turn's
prompt holds all that came before it, the engine's answers too. With several gateways each turn goes to one
drawn at random, so a conversation finds its cache only if gateways agree on where it is.

Each way of routing meets the same conversations, and engines with empty caches that hold the whole trace once
when it is spread over all of them, and not twice.

    hit        prompt tokens from caches, over all prompt tokens; `of possible`: over those that an earlier
               request of the trace had, in whole pages
    ttft       from placing a request to its first token
    load       tokens in work over time, of the most loaded engine over the mean (goal: at most 1.5)
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
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mizzen.common.options import flag
from mizzen.core.sampling_params import SamplingParams
from mizzen.gateway.admission.admission import Admission, Ticket
from mizzen.gateway.engines.engine_table import EngineTable, Found
from mizzen.gateway.requests.generation_request import Wish
from mizzen.gateway.routing.dispatcher import Dispatcher, Job
from mizzen.gateway.routing.interfaces import Candidate
from mizzen.gateway.routing.router import Router, default_router
from mizzen.gateway.routing.scorers import SameText, Serving
from mizzen.gateway.telemetry.metrics import Metrics

MODEL = Path(__file__).parents[1] / "models" / "demo"
PAGE = 16
VOCABULARY = range(10, 1000)
SAMPLE_SECONDS = 0.02
PATIENCE_SECONDS = 300.0
MAX_LOAD = 1.5


class RoundRobin:
    """Engines in turn, whatever they hold."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, scores: Sequence[float], engines: Sequence[Candidate]) -> int:
        """See `mizzen.gateway.routing.interfaces.Picker`."""
        self._turn += 1
        return self._turn % len(engines)


@dataclass(slots=True)
class Conversation:
    """One user's turns."""

    start: float
    """Seconds from the beginning of the trace."""
    history: list[int]
    turns: list[list[int]]
    pauses: list[float]


@dataclass(slots=True)
class Tally:
    """What a run has seen."""

    prompt: int = 0
    cached: int = 0
    possible: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    loads: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def expect(self, tokens: list[int]) -> None:
        """Count what an earlier request had of a prompt, in whole pages, and remember the prompt."""
        name, fresh = (), False
        for end in range(PAGE, len(tokens), PAGE):
            name = (hash((name, *tokens[end - PAGE : end])),)
            fresh = fresh or name not in self.seen
            self.possible += 0 if fresh else PAGE
            self.seen.add(name)

    def remember(self, tokens: list[int]) -> None:
        """Remember a prompt with its answer."""
        name = ()
        for end in range(PAGE, len(tokens), PAGE):
            name = (hash((name, *tokens[end - PAGE : end])),)
            self.seen.add(name)


def trace(args: argparse.Namespace, seed: int) -> list[Conversation]:
    """Return the conversations of a run."""
    draw = random.Random(seed)

    def text(tokens: int) -> list[int]:
        return draw.choices(VOCABULARY, k=tokens)

    prompts = [text(args.shared_tokens) for _ in range(args.groups)]
    weights = [1 / (rank + 1) for rank in range(args.groups)]
    return [
        Conversation(
            start=draw.uniform(0, args.seconds * 0.5),
            history=list(draw.choices(prompts, weights)[0]),
            turns=[text(draw.randint(20, 2 * args.user_tokens - 20)) for _ in range(args.turns)],
            pauses=[draw.expovariate(2 * args.turns / args.seconds) for _ in range(args.turns)],
        )
        for _ in range(args.conversations)
    ]


@contextlib.contextmanager
def engines(args: argparse.Namespace) -> Iterator[list[str]]:
    """Run engine processes and yield their endpoints."""
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
    """Run one gateway's routing table and dispatcher, connected to all engines."""
    table = EngineTable(
        gateway=name, keys=None, timeout_seconds=30, lost_seconds=60, on_change=lambda: admission.poke()
    )
    admission = Admission(table.capacity, max_in_flight=10_000, queue_size=10_000)
    table.sync(Found(name=f"engine-{i}", uid="", endpoint=one) for i, one in enumerate(endpoints))
    async with asyncio.timeout(120):
        while sum(engine.serving for engine in table) < len(endpoints):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    try:
        yield table, Dispatcher(table, admission, router, Metrics(), 3)
    finally:
        await table.close()


async def one_turn(dispatcher: Dispatcher, prompt: list[int], most: int, tally: Tally) -> list[int]:
    """Send a prompt and return the answer's tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    wish = Wish(model="demo", sampling=sampling, prompt=tuple(prompt), max_tokens_given=True)
    job = Job(wish=wish, ticket=Ticket(time.monotonic() + PATIENCE_SECONDS))
    tally.expect(prompt)
    began = time.monotonic()
    running = await dispatcher.place(job)
    tally.first_token_seconds.append(time.monotonic() - began)
    try:
        finish = None
        while finish is None:
            _, finish = await running.next()
    finally:
        running.close()
        dispatcher.leave(job)
    tally.prompt += len(prompt)
    tally.cached += finish.cached_tokens
    return list(job.given)


async def converse(
    one: Conversation,
    dispatchers: list[Dispatcher],
    args: argparse.Namespace,
    draw: random.Random,
    tally: Tally,
) -> None:
    """Have a conversation, each turn by a gateway drawn at random."""
    await asyncio.sleep(one.start)
    history = list(one.history)
    for said, pause in zip(one.turns, one.pauses, strict=True):
        history += said
        history += await one_turn(draw.choice(dispatchers), history, args.answer_tokens, tally)
        tally.remember(history)
        await asyncio.sleep(pause)


@contextlib.asynccontextmanager
async def sampled(tables: list[EngineTable], tally: Tally) -> AsyncIterator[None]:
    """Add up each engine's tokens in work, of all gateways, over time."""

    async def sample() -> None:
        while True:
            for table in tables:
                for engine in table:
                    tally.loads[engine.name] = tally.loads.get(engine.name, 0.0) + engine.tokens
            tally.samples += 1
            await asyncio.sleep(SAMPLE_SECONDS)

    task = asyncio.create_task(sample())
    try:
        yield
    finally:
        task.cancel()


def new_router(way: str, args: argparse.Namespace) -> Router:
    """Return the router of a way to route."""
    if way == "round-robin":
        return Router((Serving(), SameText()), (), (), RoundRobin())
    return default_router(args.load_factor_percent)


async def run(way: str, replicas: int, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run the trace once and return its figures."""
    tally, draw = Tally(), random.Random(seed)
    with engines(args) as endpoints:
        async with contextlib.AsyncExitStack() as stack:
            pairs = [
                await stack.enter_async_context(gateway(endpoints, new_router(way, args), f"gateway-{i}"))
                for i in range(replicas)
            ]
            await stack.enter_async_context(sampled([table for table, _ in pairs], tally))
            talks = [
                converse(one, [dispatcher for _, dispatcher in pairs], args, draw, tally)
                for one in trace(args, seed)
            ]
            began = time.monotonic()
            await asyncio.gather(*talks)
            seconds = time.monotonic() - began
    times = sorted(tally.first_token_seconds)
    return {
        "requests": len(times),
        "prompt_tokens": tally.prompt,
        "cached_tokens": tally.cached,
        "hit": tally.cached / tally.prompt,
        "of_possible": tally.cached / tally.possible,
        "ttft_ms_mean": 1e3 * statistics.mean(times),
        "ttft_ms_p50": 1e3 * statistics.median(times),
        "ttft_ms_p95": 1e3 * times[int(0.95 * len(times))],
        "mean_load_tokens": statistics.mean(tally.loads.values()) / tally.samples,
        "max_over_mean_load": max(tally.loads.values()) / statistics.mean(tally.loads.values()),
        "seconds": seconds,
    }


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure; of the load, the worst."""
    found = {name: round(statistics.median(one[name] for one in runs), 4) for name in runs[0]}
    found["max_over_mean_load"] = round(max(one["max_over_mean_load"] for one in runs), 3)
    return found


def main() -> int:
    """Parse the command line, run all ways, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--gateways", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--conversations", type=int, default=96)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--groups", type=int, default=8, help="system prompts")
    parser.add_argument("--shared-tokens", type=int, default=512, help="of each system prompt")
    parser.add_argument("--user-tokens", type=int, default=80, help="of a turn, on average")
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the trace, about")
    parser.add_argument("--kv-tokens", type=int, default=40_960, help="of each engine")
    parser.add_argument("--step-milliseconds", type=float, default=20.0)
    parser.add_argument("--prefill-microseconds", type=float, default=100.0, help="a prompt token")
    parser.add_argument("--load-factor-percent", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ways = [("round-robin", 1), *(("mizzen", count) for count in args.gateways)]
    results: dict[str, dict[str, Any]] = {}
    print(f"{'way':14} {'gateways':>8} {'hit':>7} {'of possible':>12} {'ttft p50':>9} {'p95':>9} {'load':>6}")
    for way, replicas in ways:
        runs = [asyncio.run(run(way, replicas, args, seed)) for seed in range(args.rounds)]
        one = results[way if way == "round-robin" else f"gateways_{replicas}"] = median(runs)
        print(
            f"{way:14} {replicas:8} {one['hit']:7.1%} {one['of_possible']:12.1%} {one['ttft_ms_p50']:6.0f} ms"
            f" {one['ttft_ms_p95']:6.0f} ms {one['max_over_mean_load']:5.2f}x",
            flush=True,
        )
    ours = [one["max_over_mean_load"] for name, one in results.items() if name != "round-robin"]
    good = not ours or max(ours) <= MAX_LOAD
    print(f"load of the most loaded engine: {'' if good else 'above '}{MAX_LOAD}x the mean is the limit")
    if args.json:
        print(json.dumps(results))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
