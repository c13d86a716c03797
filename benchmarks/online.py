# SPDX-License-Identifier: Apache-2.0
"""Latency and throughput of any OpenAI-compatible server by request rate, in an open loop.

    python benchmarks/online.py http://127.0.0.1:8000 --rate 1 2 4 8 --requests 500 [--json]
    python benchmarks/online.py URL --rate 4 --input "N(480,240)" --output "N(300,150)" --burstiness 2
    python benchmarks/online.py URL --rate 1 --requests 400 --turns 4 --think 2 --text --chat
    python benchmarks/online.py URL --trace trace.jsonl --speed 0.5 1 2 --hash-block 16

Requests are sent when they are due, even if earlier requests are still open: the number of open requests is
not limited. All latencies count from the time at which a request was due, not from the time at which the
client sent it. A failed request counts as an error, and does not count in any latency. In a session of
several turns, each turn is due some time after the answer to the previous turn; sessions start in the open
loop. The delay of the client itself is reported; if it is not small compared with the latencies, spread the
client over several `--processes`.

Prompts are random token ids below `--vocabulary` (for /v1/completions), or random words with `--text` (for
/v1/chat/completions with `--chat`). Unless `--eos` is given, requests have `ignore_eos`, so that answers have
the requested length. Token counts come from the server's `usage`. A server may send several tokens in one
piece of text, so the time between tokens is actually the time between pieces; the mean number of tokens per
piece is reported.

`shape_folder.py` writes a folder with the shape of a model and a tokenizer, which `mizzen serve --load-format
dummy` serves.

A trace has one JSON object per line with `at` (or `timestamp`), `max_tokens` (or `output_length`), and either
`prompt` or `input_length`; `hash_ids` say which prompts share blocks. `--speed 2` replays the trace twice as
fast, and `--requests 100` replays only its first 100 requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from common_parts.arguments import Help, above_zero, given_options, jsonable, natural, not_negative, positive
from common_parts.lengths import lengths
from online_parts.gateway_share import (
    READ_ERRORS,
    Histogram,
    describe_share,
    fetch_histograms,
    summarize_share,
)
from online_parts.recorded import Entry, read_trace, trace_requests, trace_sessions
from online_parts.replay import Target, run
from online_parts.summary import summarize
from online_parts.trace import Session, Texts, Workload, generate, rate_of

COLUMNS = ("first_token_ms", "per_token_ms", "between_tokens_ms")
REQUESTS = 200
"""Default number of requests in a run without a trace."""
MAX_REPLAY_SECONDS = 6 * 3600.0
"""Maximum seconds of a replay without --trace-unit; beyond it, the trace's unit is probably not seconds."""
WITHOUT_TRACE = ("rate", "burstiness", "input", "output", "shared", "groups", "turns", "think")
"""Options that describe random requests; with a trace, they have no effect."""
WITH_TRACE = ("speed", "trace_unit", "hash_block")
LAG_SHARE = 0.1
"""Maximum p99 of the client's own delay, as a share of the median time to the first token; beyond it, the run
prints a warning."""


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, for argparse."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def make_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("url", help="base URL of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", help="model name in requests; by default the first that the server lists")
    parser.add_argument(
        "--rate", type=above_zero, nargs="+", default=[1.0], help="sessions per second; one run for each"
    )
    parser.add_argument(
        "--requests",
        type=positive,
        help=f"number of requests in a run; by default {REQUESTS}, or all of a trace",
    )
    parser.add_argument(
        "--burstiness",
        type=not_negative,
        default=1.0,
        help="coefficient of variation of the gaps between sessions: 0 even, 1 Poisson, 2 bursts",
    )
    parser.add_argument("--input", type=lengths, default="U(100,1024)", help="distribution of prompt tokens")
    parser.add_argument("--output", type=lengths, default="U(100,1024)", help="distribution of output tokens")
    parser.add_argument(
        "--shared", type=natural, default=0, help="tokens of the prefix that prompts of a group share"
    )
    parser.add_argument("--groups", type=positive, default=1, help="groups of prompts that share a prefix")
    parser.add_argument("--turns", type=positive, default=1, help="turns (requests) of a session")
    parser.add_argument(
        "--think", type=not_negative, default=1.0, help="mean seconds between an answer and the next turn"
    )
    parser.add_argument("--trace", type=Path, help="trace file to replay instead of random requests")
    parser.add_argument(
        "--speed", type=above_zero, nargs="+", default=[1.0], help="speed of the replay; one run for each"
    )
    parser.add_argument(
        "--trace-unit", type=above_zero, default=1.0, help="unit of the trace's times, in seconds"
    )
    parser.add_argument(
        "--hash-block", type=positive, default=16, help="tokens in a block of the trace's hash_ids"
    )
    parser.add_argument("--text", action="store_true", help="send words instead of token ids")
    parser.add_argument("--chat", action="store_true", help="use /v1/chat/completions (with --text)")
    parser.add_argument("--vocabulary", type=positive, default=10_000, help="upper bound of token ids")
    parser.add_argument("--eos", action="store_true", help="let the model end its answers itself")
    parser.add_argument(
        "--temperature", type=not_negative, help="sampling temperature; by default that of the server"
    )
    parser.add_argument(
        "--body", type=json_object, default={}, help="further fields of each request, as a JSON object"
    )
    parser.add_argument(
        "--metrics",
        nargs="+",
        default=[],
        metavar="URL",
        help="metrics pages of the gateway and engines; runs then report the latency that the gateway adds, "
        "to the requests of the warm-up as well",
    )
    parser.add_argument("--key-env", default="OPENAI_API_KEY", help="environment variable with the API key")
    parser.add_argument("--timeout", type=above_zero, default=600.0, help="seconds allowed for an answer")
    parser.add_argument(
        "--warm", type=not_negative, default=0.0, help="seconds at the start whose latencies do not count"
    )
    parser.add_argument(
        "--good-first", type=above_zero, help="maximum milliseconds to the first token of a good request"
    )
    parser.add_argument(
        "--good-token", type=above_zero, help="maximum mean ms per further token of a good request"
    )
    parser.add_argument("--processes", type=positive, default=1, help="number of client processes")
    parser.add_argument("--seed", type=natural, default=0, help="seed of all random choices")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    return parser


async def first_model(url: str, key: str | None) -> str:
    """Return the name of the first model that the server lists."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    address = f"{url.rstrip('/').removesuffix('/v1')}/v1/models"
    async with aiohttp.ClientSession(headers=headers) as http, http.get(address) as response:
        response.raise_for_status()
        return (await response.json())["data"][0]["id"]


def entries_of(args: argparse.Namespace) -> list[Entry]:
    """Return the requests to replay from the trace, in order of time.

    If `--requests` leaves out some requests of the trace, print how many are replayed.

    Raises:
        ValueError: the trace cannot be replayed; the message names the line and the reason.
    """
    entries = read_trace(args.trace, block=args.hash_block)
    if args.chat and any(isinstance(entry.prompt, list) for entry in entries):
        raise ValueError(f"{args.trace} has prompts of token ids, which --chat cannot send")
    if args.requests is not None and args.requests < len(entries):
        print(f"the first {args.requests} of {len(entries)} requests of the trace, by time")
        return entries[: args.requests]
    return entries


def workloads(args: argparse.Namespace, entries: list[Entry]) -> list[tuple[str, list[Session]]]:
    """Return the name and the sessions of each run; `entries` are the requests of the trace, if any."""
    vocabulary = None if args.text else args.vocabulary
    if args.trace is not None:
        texts = Texts(np.random.default_rng(args.seed), vocabulary)
        requests = list(trace_requests(entries, texts, unit=args.trace_unit, block=args.hash_block))
        return [(f"speed {speed:g}", trace_sessions(requests, speed)) for speed in args.speed]
    runs = []
    for index, rate in enumerate(args.rate):
        # Each rate has its own prompts, so that none is in the server's cache.
        texts = Texts(np.random.default_rng([args.seed, index]), vocabulary)
        workload = Workload(
            requests=args.requests,
            rate=rate,
            burstiness=args.burstiness,
            inputs=args.input,
            outputs=args.output,
            shared=args.shared,
            groups=args.groups,
            turns=args.turns,
            think=args.think,
        )
        runs.append((f"rate {rate:g}", generate(workload, texts)))
    return runs


def find_useless_option(args: argparse.Namespace, given: set[str]) -> str | None:
    """Return an error message if the command line has an option that has no effect, else None."""
    names = WITH_TRACE if args.trace is None else WITHOUT_TRACE
    options = ", ".join(f"--{name.replace('_', '-')}" for name in names if name in given)
    if not options:
        return None
    reason = "without --trace" if args.trace is None else "with --trace, which has its own requests and times"
    return f"{options} would have no effect {reason}"


def find_wrong_unit(args: argparse.Namespace, entries: list[Entry], given: set[str]) -> str | None:
    """Return an error message if the trace's times are probably not in the default unit, else None.

    This is so if the replay would take very long, and the command line has no `--trace-unit`.
    """
    seconds = (entries[-1].at - entries[0].at) * args.trace_unit / min(args.speed)
    if seconds <= MAX_REPLAY_SECONDS or "trace_unit" in given:
        return None
    return (
        f"replaying {args.trace} would take {duration(seconds)}: give --trace-unit 0.001 if its times are "
        "milliseconds, or --trace-unit 1 if they are seconds"
    )


def duration(seconds: float) -> str:
    """Return a duration as text."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def announce(name: str, sessions: list[Session]) -> str:
    """Return a line with the number of requests of a run, and the time at which the last session starts."""
    count, last = (
        sum(len(session.requests) for session in sessions),
        max(s.requests[0].after for s in sessions),
    )
    several = f" in {len(sessions)} sessions of several turns" if count > len(sessions) else ""
    return f"{name}: {count} requests{several}, the last starts in {duration(last)}"


def cell(figures: dict[str, float] | None) -> str:
    """Return p50, p90 and p99 as a table cell; a dash if there are no figures."""
    return "-" if figures is None else "/".join(f"{figures[q]:.1f}" for q in ("p50", "p90", "p99"))


def hint(kind: str, detail: str) -> str:
    """Return a hint about the option that may have caused a server error; "" if there is no such option."""
    message = detail.lower()
    if "vocab" in message or ("prompt" in message and "token id" in message):
        return " (--vocabulary must not exceed the model's vocabulary)"
    not_found = "exist" in message or "not found" in message
    if "model" in message and kind in ("status 400", "status 404") and not_found:
        return " (--model must be one that the server lists)"
    return ""


def print_run(name: str, result: dict[str, Any], warm: float) -> None:
    """Print the table row of a run, its errors, and warnings."""
    errors = sum(result["errors"].values())
    pieces = "-" if result["tokens_per_piece"] is None else f"{result['tokens_per_piece']:.2f}"
    print(
        f"{name:>12} {result['requests_per_second']:>7.2f} {result['output_tokens_per_second']:>9.0f} "
        + " ".join(f"{cell(result[column]):>23}" for column in COLUMNS)
        + f" {pieces:>9} {result['most_in_flight']:>6} {errors:>6}",
        flush=True,
    )
    for kind, count in result["errors"].items():
        detail = result["error_details"].get(kind, "")
        print(f"             {count} x {kind}" + (f": {detail}{hint(kind, detail)}" if detail else ""))
    if result.get("gateway_ms") is not None:
        print(f"             {describe_share(result['gateway_ms'])}")
    if warm > (last := result["last_due_seconds"]):
        print(
            f"             no latencies: --warm is {warm:g} s, but the last request was due at {last:.1f} s"
        )
    lag, first = result["client_lag_ms"], result["first_token_ms"]
    if lag and first and lag["p99"] > LAG_SHARE * first["p50"]:
        print(f"             the client was {lag['p99']:.1f} ms late (p99): try --processes")


def measure(args: argparse.Namespace, target: Target, sessions: list[Session]) -> dict[str, Any]:
    """Send the requests of a run, and return its summary."""
    before = try_histograms(args.metrics)
    records = run(target, sessions, args.processes)
    result = {
        "sessions_per_second": rate_of(sessions),
        **summarize(
            records,
            warm=args.warm,
            most_first=None if args.good_first is None else args.good_first / 1e3,
            most_token=None if args.good_token is None else args.good_token / 1e3,
        ),
    }
    if args.metrics:
        after = try_histograms(args.metrics)
        result["gateway_ms"] = None if before is None or after is None else summarize_share(before, after)
    return result


def try_histograms(urls: list[str]) -> dict[str, Histogram] | None:
    """Return the histograms of metrics pages; print why and return None if they cannot be read."""
    try:
        return fetch_histograms(urls)
    except READ_ERRORS as error:
        print(f"             no latency of the gateway: the metrics cannot be read: {error}")
        return None


def main() -> int:
    """Run the benchmark; return 1 if any request failed."""
    parser = make_parser()
    args = parser.parse_args()
    given = given_options(parser)
    if message := find_useless_option(args, given):
        parser.error(message)
    if args.chat and not args.text:
        parser.error("--chat needs --text: messages cannot contain token ids")
    if args.trace is not None and not args.trace.is_file():
        parser.error(f"--trace {args.trace} is not a file")
    if args.trace is None:
        args.requests = args.requests or REQUESTS
    try:
        entries = entries_of(args) if args.trace is not None else []
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if entries and (message := find_wrong_unit(args, entries, given)):
        parser.error(message)
    key = os.environ.get(args.key_env)
    try:
        model = args.model or asyncio.run(first_model(args.url, key))
    except (aiohttp.ClientError, TimeoutError, LookupError, TypeError, ValueError) as error:
        sys.exit(f"{args.url} does not list its models: {error or type(error).__name__}")
    target = Target(
        url=args.url,
        model=model,
        chat=args.chat,
        key=key,
        timeout=args.timeout,
        temperature=args.temperature,
        exact=not args.eos,
        body=args.body,
    )
    try:
        fetch_histograms(args.metrics)
    except READ_ERRORS as error:
        sys.exit(f"--metrics {' '.join(args.metrics)}: the metrics cannot be read: {error}")
    print(f"{target.model} at {target.endpoint}; ms at p50/p90/p99")
    print(
        f"{'':>12} {'req/s':>7} {'out tok/s':>9} {'first token':>23} {'per token':>23} "
        f"{'between tokens':>23} {'tok/piece':>9} {'open':>6} {'errors':>6}"
    )
    results = {}
    for name, sessions in workloads(args, entries):
        print(announce(name, sessions), flush=True)
        results[name] = result = measure(args, target, sessions)
        print_run(name, result, args.warm)
    if args.json:
        output = {"model": target.model, "options": vars(args), "runs": results}
        print(json.dumps(jsonable(output), default=str))
    return 1 if any(result["errors"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
