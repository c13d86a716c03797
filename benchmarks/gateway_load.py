# SPDX-License-Identifier: Apache-2.0
"""Throughput of the gateway on one core, the latency that it adds, and its cost while idle.

    python benchmarks/gateway_load.py --json

The gateway is the real command. Engines are simulated in processes of their own, which speak the real wire
protocol at scripted speeds. The client is another process; it can compute the right answer from each prompt,
and checks every byte. The tokenizer is byte-level BPE with 128,000 entries; it is trained on the first run,
and kept in the temporary folder. With two cores or more, the gateway runs alone on one core, and everything
else on the other cores. The phases are:

    streams    throughput with as many streams as one core can serve without merging tokens of a stream (200
               prompt tokens and 100 output tokens each): requests and chunks (events with text) per
               CPU-second of all processes and threads of the gateway
    full       the same with four times as many streams, so that several tokens of a stream share a chunk
    added      latency that the gateway adds, at 60 % of the throughput of `streams` and with random arrivals:
               the time from the engine's send to the client's receipt of each token. For the first token of a
               request, the time from the client's send to the engine's receipt of the request is added.
               `added_ms` covers all tokens, `added_first_token_ms` only first tokens. If several tokens form
               one character, only the last of them counts, because clients get complete characters
    long       number of prompts per CPU-second, if each prompt has 100,000 tokens
    idle       CPU use of a gateway with 100 engines and no requests
    held       CPU and memory use of a gateway with 2,000 open streams for a minute, each with one token per
               second
    churn      growth of resident memory while streams come and go (`--churn-seconds 3600` for an hour)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from gateway_parts.client import ClientProcess
from gateway_parts.engines import Engines, Script, Timing, reply_start
from gateway_parts.process import CpuMeter, GatewayProcess
from gateway_parts.streams import Plan, Result
from gateway_parts.vocabulary import Vocabulary

from mizzen.engine.grammar.vocabulary import byte_alphabet

PHASES = ("streams", "full", "added", "long", "idle", "held", "churn")
GOALS = {
    "requests_per_second_per_core": 150.0,
    "chunks_per_second_per_core": 15_000.0,
    "added_ms.p50": 1.0,
    "added_ms.p99": 8.0,
    "prompts_100k_per_second_per_core": 2.0,
    "idle_100_engines_cores": 0.05,
}


@dataclass(frozen=True, slots=True)
class Setup:
    """Objects and settings that all phases share."""

    arguments: argparse.Namespace
    vocabulary: Vocabulary
    replies: Any
    gateway_cores: set[int]
    other_cores: set[int]

    def script(self, step_seconds: float) -> Script:
        """Return a script for engines that generate one token per request every `step_seconds`."""
        return Script(
            files=self.vocabulary.files,
            replies=self.replies,
            vocab_size=self.vocabulary.tokenizer.get_vocab_size(),
            step_seconds=step_seconds,
        )

    def engines(self, count: int, processes: int, step_seconds: float) -> Engines:
        """Start `count` simulated engines in the given number of processes."""
        return Engines(count, processes, self.script(step_seconds), self.other_cores)

    def gateway(self, engines: Engines) -> GatewayProcess:
        """Start a gateway that serves the engines."""
        options = ["--max-in-flight", "2500", *self.arguments.gateway_option]
        return GatewayProcess(engines.endpoints, self.gateway_cores, options)

    def run(self, gateway: GatewayProcess, **plan: Any) -> tuple[Result, float]:
        """Run a client plan; return its result and the gateway's CPU-seconds in the measured span.

        Raises:
            SystemExit: an answer was incorrect, or a stream did not end.
        """
        client = ClientProcess(Plan(port=gateway.port, **plan), self.other_cores)
        with CpuMeter(gateway) as meter:
            client.start()
            result = client.result()
        if result.failed:
            lines = "\n  ".join(result.failures)
            sys.exit(f"{result.failed} of {result.failed + result.good} answers are incorrect:\n  {lines}")
        return result, meter.seconds(result.began, result.ended)


def streams(setup: Setup, gateway: GatewayProcess, concurrency: int) -> dict[str, float]:
    """Measure the gateway's throughput with `concurrency` streams at once."""
    options = setup.arguments
    result, cpu = setup.run(
        gateway,
        prompt_tokens=200,
        output_tokens=options.output_tokens,
        concurrency=concurrency,
        warm_seconds=3.0,
        seconds=options.seconds,
    )
    wall = result.ended - result.began
    return {
        "requests_per_second_per_core": result.requests / cpu,
        "chunks_per_second_per_core": result.chunks / cpu,
        "requests_per_second": result.requests / wall,
        "chunks_per_second": result.chunks / wall,
        "busy_cores": cpu / wall,
        "checked_answers": result.good,
    }


def added_latency(setup: Setup, gateway: GatewayProcess, engines: Engines, rate: float) -> dict[str, Any]:
    """Measure the latency that the gateway adds if `rate` requests per second arrive."""
    engines.take_timings()
    result, cpu = setup.run(
        gateway,
        prompt_tokens=200,
        output_tokens=setup.arguments.output_tokens,
        rate=rate,
        warm_seconds=2.0,
        seconds=setup.arguments.seconds,
        timings=True,
    )
    timings = engines.take_timings()
    first, tokens = latencies(setup, result, timings)
    return {
        "added_ms": percentiles(tokens),
        "added_first_token_ms": percentiles(first),
        "rate": rate,
        "busy_cores": cpu / (result.ended - result.began),
        "measured_requests": len(first),
    }


def character_ends(vocabulary: Vocabulary, replies: Any) -> np.ndarray:
    """Return for each token of `replies` whether it completes a character, bool [tokens]."""
    alphabet, ends, missing = byte_alphabet(), np.zeros(len(replies), bool), 0
    for at, token in enumerate(replies.tolist()):
        for character in vocabulary.tokenizer.id_to_token(token):
            byte = alphabet[character]
            missing = missing - 1 if 0x80 <= byte < 0xC0 else sum(byte >= low for low in (0xC0, 0xE0, 0xF0))
        ends[at] = missing <= 0
    return ends


def latencies(setup: Setup, result: Result, timings: dict[int, Timing]) -> tuple[np.ndarray, np.ndarray]:
    """Return the latency in milliseconds that the gateway added to first tokens, and to all tokens."""
    first, tokens = [], []
    ends = character_ends(setup.vocabulary, setup.replies)
    for arrival in result.arrivals:
        timing = timings.get(arrival.key)
        if timing is None or len(timing.sent) != len(arrival.tokens):
            continue
        delays = arrival.tokens - timing.sent
        delays[0] += timing.received - arrival.sent
        start = reply_start(arrival.key, len(setup.replies))
        complete = ends[start : start + len(delays)]
        tokens.append(delays[complete])
        if complete[0]:
            first.append(delays[0])
    return np.array(first) * 1000, np.concatenate(tokens) * 1000


def percentiles(values: np.ndarray) -> dict[str, float]:
    """Return the median and the 99th percentile."""
    return {"p50": float(np.percentile(values, 50)), "p99": float(np.percentile(values, 99))}


def long_prompts(setup: Setup, gateway: GatewayProcess) -> dict[str, float]:
    """Measure the gateway's throughput with prompts of 100,000 tokens."""
    result, cpu = setup.run(
        gateway,
        prompt_tokens=100_000,
        output_tokens=4,
        concurrency=2,
        warm_seconds=2.0,
        seconds=8.0,
        prompts=16,
    )
    return {"prompts_100k_per_second_per_core": result.requests / cpu, "checked_answers": result.good}


def idle(setup: Setup) -> dict[str, float]:
    """Measure the CPU use of a gateway with 100 engines and no requests."""
    with setup.engines(100, 4, 0.01) as engines, setup.gateway(engines) as gateway:
        time.sleep(3)
        with CpuMeter(gateway) as meter:
            began = time.monotonic()
            time.sleep(10)
            ended = time.monotonic()
        return {"idle_100_engines_cores": meter.seconds(began, ended) / (ended - began)}


def held(setup: Setup) -> dict[str, float]:
    """Measure for a minute the CPU and memory use of a gateway with 2,000 open streams."""
    with setup.engines(10, 10, 1.0) as engines, setup.gateway(engines) as gateway:
        result, cpu = setup.run(
            gateway,
            prompt_tokens=200,
            output_tokens=64,
            concurrency=2000,
            once=True,
            warm_seconds=4.0,
            seconds=64.0,
        )
        if result.max_open < 2000:
            sys.exit(f"only {result.max_open} streams were open at once")
        return {
            "held_streams": result.good,
            "held_seconds": 60.0,
            "held_cores": cpu / (result.ended - result.began),
            "held_bytes_a_stream": gateway.memory() / 2000,
        }


def churn(setup: Setup, gateway: GatewayProcess) -> dict[str, float]:
    """Measure how much the gateway's memory grows in the second half of a run of short-lived streams."""
    seconds, rate = setup.arguments.churn_seconds, setup.arguments.churn_rate
    pace: dict[str, Any] = {"rate": rate} if rate else {"concurrency": 64}
    before = gateway.memory()
    requests, marks = 0, [before]
    for part in range(max(2, round(seconds / 60))):
        span = min(60.0, seconds / 2)
        result, _ = setup.run(
            gateway, prompt_tokens=200, output_tokens=20, seconds=span, seed=50 + part, **pace
        )
        requests += result.good
        marks.append(gateway.memory())
        print(f"{part:4} {requests:9} requests {marks[-1] / 2**20:8.2f} MiB", flush=True)
    half = marks[len(marks) // 2]
    return {
        "churn_requests": requests,
        "churn_seconds": seconds,
        "memory_before_mib": before / 2**20,
        "memory_after_mib": marks[-1] / 2**20,
        "memory_growth_second_half_percent": 100 * (marks[-1] / half - 1),
    }


def measure(setup: Setup) -> dict[str, Any]:
    """Run the phases that the command line selects, and return their figures."""
    phases, results = setup.arguments.phase or PHASES, {}
    if {"streams", "full", "added", "long", "churn"} & set(phases):
        options = setup.arguments
        with (
            setup.engines(options.engines, options.engines, options.step_ms / 1000) as engines,
            setup.gateway(engines) as gateway,
        ):
            if "streams" in phases:
                runs = [streams(setup, gateway, options.concurrency) for _ in range(options.repeat)]
                results |= print_figures(max(runs, key=lambda run: run["chunks_per_second_per_core"]))
            if "full" in phases:
                print("with more streams than one core can serve without merging tokens:")
                results["full"] = print_figures(streams(setup, gateway, 4 * options.concurrency))
            if "added" in phases:
                full = min(
                    results.get("requests_per_second_per_core", 150.0),
                    results.get("chunks_per_second_per_core", 15_000.0) / options.output_tokens,
                )
                rate = options.rate or 0.6 * full
                runs = [added_latency(setup, gateway, engines, rate) for _ in range(options.repeat)]
                results |= {"added": print_figures(min(runs, key=lambda run: run["added_ms"]["p99"]))}
                results |= {key: results["added"].pop(key) for key in ("added_ms", "added_first_token_ms")}
            if "long" in phases:
                results |= print_figures(long_prompts(setup, gateway))
            if "churn" in phases:
                results |= print_figures(churn(setup, gateway))
    if "idle" in phases:
        results |= print_figures(idle(setup))
    if "held" in phases:
        results |= print_figures(held(setup))
    return results


def print_figures(figures: dict[str, Any]) -> dict[str, Any]:
    """Print figures with their goals, and return the figures."""
    for name, value in figures.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, number in parts:
            key = f"{name}.{part}" if part else name
            goal = GOALS.get(key)
            suffix = "" if goal is None else f"   goal {goal:g}, {number / goal:.0%} of it"
            print(f"{key:38} {number:12.3f}{suffix}", flush=True)
    return figures


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--phase", action="append", choices=PHASES, help="run only this phase; repeatable")
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="measured seconds of a run of streams or added"
    )
    parser.add_argument("--repeat", type=int, default=2, help="runs of streams and added; the best counts")
    parser.add_argument("--engines", type=int, default=10)
    parser.add_argument("--step-ms", type=float, default=10.0, help="time between an engine's tokens")
    parser.add_argument("--concurrency", type=int, default=140, help="streams at once in streams")
    parser.add_argument(
        "--output-tokens", type=int, default=100, help="output tokens of streams, full and added"
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=0.0,
        help="requests per second in added; by default 60 %% of the throughput of one core",
    )
    parser.add_argument("--churn-seconds", type=float, default=20.0)
    parser.add_argument(
        "--churn-rate",
        type=float,
        default=0.0,
        help="streams started per second in churn; by default 64 streams run at once",
    )
    parser.add_argument(
        "--gateway-option",
        action="append",
        default=[],
        help="further option for the gateway's command line, such as --gateway-option=--x; repeatable",
    )
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    vocabulary = Vocabulary()
    setup = Setup(
        arguments,
        vocabulary,
        np.array(vocabulary.replies(), np.int32),
        {cores[-1]},
        set(cores[:-1]) or {cores[0]},
    )
    print(f"{len(cores)} cores; tokenizer of {vocabulary.tokenizer.get_vocab_size()} entries", flush=True)
    results = measure(setup)
    if arguments.json:
        print(json.dumps(results | {"goals": GOALS}))


if __name__ == "__main__":
    main()
