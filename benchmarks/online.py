"""Latency and throughput of any server with the OpenAI API, by request rate (open loop).

    python benchmarks/online.py http://127.0.0.1:8000 --rate 1 2 4 8 --requests 500 [--json]
    python benchmarks/online.py URL --rate 4 --input "N(480,240)" --output "N(300,150)" --burstiness 2
    python benchmarks/online.py URL --rate 1 --requests 400 --turns 4 --think 2 --text --chat
    python benchmarks/online.py URL --trace trace.jsonl --speed 0.5 1 2 --hash-block 16

Requests are sent when they are due, whatever became of those before: no number of open requests holds one
back. All latencies count from when a request was due, not from when the client came to send it, and a failed
request is counted as an error and in no latency. Of a session of several turns each is due a while after the
answer to the one before; sessions begin in the open loop. How far the client itself was behind is told: where
that is not small beside the latencies, `--processes` spreads the client.

Prompts are random token ids below `--vocabulary` (/v1/completions), or random words with `--text` (and
/v1/chat/completions with `--chat`). Answers have the length asked for: `ignore_eos` is sent unless `--eos`.
Token counts are those of the server's `usage`. A server may put several tokens into one piece of text, which
comes at one time: how many is told, for the time between tokens is that between pieces.

A trace is a JSON object a line: `at` (or `timestamp`), `max_tokens` (or `output_length`), and `prompt` or
`input_length`, with `hash_ids` where prompts share blocks. `--speed 2` replays it twice as fast, and
`--requests` the first of it alone.
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
from arguments import Help, above_zero, given, natural, not_negative, plain, positive
from online_parts.recorded import Entry, asked, read, recorded
from online_parts.replay import Target, run
from online_parts.summary import summarize
from online_parts.trace import Lengths, Session, Texts, Workload, generate, rate_of

COLUMNS = ("first_token_ms", "per_token_ms", "between_tokens_ms")
REQUESTS = 200
"""In a run that replays no trace."""
LONGEST = 6 * 3600.0
"""Seconds that a replay takes at most unless it is told what the trace's times mean."""
WITHOUT_TRACE = ("rate", "burstiness", "input", "output", "shared", "groups", "turns", "think")
"""Options that draw what a trace says."""
WITH_TRACE = ("speed", "trace_unit", "hash_block")
LAG_SHARE = 0.1
"""A client that is behind by more than this share of the median time to the first token is named."""


def lengths(text: str) -> Lengths:
    try:
        return Lengths(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    made.add_argument("url", help="base of the server, as in http://127.0.0.1:8000")
    made.add_argument("--model", help="name in requests; by default the first that the server lists")
    made.add_argument(
        "--rate", type=above_zero, nargs="+", default=[1.0], help="sessions a second, each a run"
    )
    made.add_argument(
        "--requests", type=positive, help=f"in a run; by default {REQUESTS}, or all that a trace has"
    )
    made.add_argument(
        "--burstiness", type=not_negative, default=1.0, help="of arrivals: 1 Poisson, 0 even, 2 bursts"
    )
    made.add_argument("--input", type=lengths, default="U(100,1024)", help="prompt tokens")
    made.add_argument("--output", type=lengths, default="U(100,1024)", help="tokens of answers")
    made.add_argument("--shared", type=natural, default=0, help="tokens that prompts of a group begin with")
    made.add_argument("--groups", type=positive, default=1, help="of prompts that begin alike")
    made.add_argument("--turns", type=positive, default=1, help="requests of a session")
    made.add_argument(
        "--think", type=not_negative, default=1.0, help="mean seconds between answer and next turn"
    )
    made.add_argument("--trace", type=Path, help="replay this file instead")
    made.add_argument("--speed", type=above_zero, nargs="+", default=[1.0], help="of the trace, each a run")
    made.add_argument(
        "--trace-unit", type=above_zero, default=1.0, help="seconds that 1 of a time stands for"
    )
    made.add_argument("--hash-block", type=positive, default=16, help="tokens in a block of hash_ids")
    made.add_argument("--text", action="store_true", help="send words, not token ids")
    made.add_argument("--chat", action="store_true", help="use /v1/chat/completions (with --text)")
    made.add_argument("--vocabulary", type=positive, default=10_000, help="token ids are below")
    made.add_argument("--eos", action="store_true", help="let the model end its answers")
    made.add_argument("--temperature", type=not_negative, help="by default the server's")
    made.add_argument("--body", type=json_object, default={}, help="more fields of each request, as JSON")
    made.add_argument("--key-env", default="OPENAI_API_KEY", help="variable with the API key")
    made.add_argument("--timeout", type=above_zero, default=600.0, help="seconds that an answer may take")
    made.add_argument("--warm", type=not_negative, default=0.0, help="seconds whose latencies do not count")
    made.add_argument("--good-first", type=above_zero, help="ms to the first token that are good enough")
    made.add_argument("--good-token", type=above_zero, help="ms a token that are good enough")
    made.add_argument("--processes", type=positive, default=1, help="of the client")
    made.add_argument("--seed", type=natural, default=0, help="of all that is drawn")
    made.add_argument("--json", action="store_true", help="end with one JSON object")
    return made


async def first_model(url: str, key: str | None) -> str:
    """Return the first model that a server lists."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    address = f"{url.rstrip('/').removesuffix('/v1')}/v1/models"
    async with aiohttp.ClientSession(headers=headers) as http, http.get(address) as response:
        response.raise_for_status()
        return (await response.json())["data"][0]["id"]


def entries_of(args: argparse.Namespace) -> list[Entry]:
    """Return what is replayed of the trace, in order of time, and say so where that is not all.

    Raises:
        ValueError: the trace cannot be replayed; says which line and why.
    """
    entries = read(args.trace, block=args.hash_block)
    if args.chat and any(isinstance(entry.prompt, list) for entry in entries):
        raise ValueError(f"{args.trace} has prompts of token ids, which --chat cannot send")
    if args.requests is not None and args.requests < len(entries):
        print(f"{args.requests} of {len(entries)} requests of the trace, the first by time")
        return entries[: args.requests]
    return entries


def workloads(args: argparse.Namespace, entries: list[Entry]) -> list[tuple[str, list[Session]]]:
    """Return the runs: a name, and what is asked. `entries` are the trace's, where there is one."""
    vocabulary = None if args.text else args.vocabulary
    if args.trace is not None:
        texts = Texts(np.random.default_rng(args.seed), vocabulary)
        asks = list(asked(entries, texts, unit=args.trace_unit, block=args.hash_block))
        return [(f"speed {speed:g}", recorded(asks, speed)) for speed in args.speed]
    runs = []
    for index, rate in enumerate(args.rate):
        # Each rate has prompts of its own, so that none is in the server's cache.
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


def useless(args: argparse.Namespace, told: set[str]) -> str | None:
    """Return what is wrong where an option is given that changes nothing."""
    names = WITH_TRACE if args.trace is None else WITHOUT_TRACE
    options = ", ".join(f"--{name.replace('_', '-')}" for name in names if name in told)
    if not options:
        return None
    why = "without --trace" if args.trace is None else "with --trace, which says what is asked and when"
    return f"{options} would change nothing {why}"


def too_long(args: argparse.Namespace, entries: list[Entry], told: set[str]) -> str | None:
    """Return what is wrong where a trace's times are hardly in the unit that they are taken for."""
    seconds = (entries[-1].at - entries[0].at) * args.trace_unit / min(args.speed)
    if seconds <= LONGEST or "trace_unit" in told:
        return None
    return (
        f"replaying {args.trace} would take {duration(seconds)}: give --trace-unit 0.001 if its times are "
        "milliseconds, or --trace-unit 1 if they are seconds"
    )


def duration(seconds: float) -> str:
    """Return a time in words."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def plan(name: str, sessions: list[Session]) -> str:
    """Return what a run is about to ask, and how long that takes at least."""
    asks, last = sum(len(session.asks) for session in sessions), max(s.asks[0].after for s in sessions)
    several = f" in {len(sessions)} sessions of several turns" if asks > len(sessions) else ""
    return f"{name}: {asks} requests{several}, the last begins in {duration(last)}"


def cell(figures: dict[str, float] | None) -> str:
    return "-" if figures is None else "/".join(f"{figures[q]:.1f}" for q in ("p50", "p90", "p99"))


def hint(kind: str, detail: str) -> str:
    """Return the option that an error may be about; empty where it names none."""
    said = detail.lower()
    if "vocab" in said or ("prompt" in said and "token id" in said):
        return " (--vocabulary has to be no more than the model's)"
    if "model" in said and kind in ("status 400", "status 404") and ("exist" in said or "not found" in said):
        return " (--model has to be one that the server lists)"
    return ""


def show(name: str, result: dict[str, Any], warm: float) -> None:
    """Print a run's line, and what went wrong in it."""
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
    if warm > (last := result["last_due_seconds"]):
        print(
            f"             no latency counts: --warm is {warm:g} s, the last request was due at {last:.1f} s"
        )
    lag, first = result["client_lag_ms"], result["first_token_ms"]
    if lag and first and lag["p99"] > LAG_SHARE * first["p50"]:
        print(f"             the client was {lag['p99']:.1f} ms behind (p99): try --processes")


def main() -> int:
    made = parser()
    args = made.parse_args()
    told = given(made)
    if wrong := useless(args, told):
        made.error(wrong)
    if args.chat and not args.text:
        made.error("--chat needs --text: messages hold no token ids")
    if args.trace is not None and not args.trace.is_file():
        made.error(f"--trace {args.trace} is no file")
    if args.trace is None:
        args.requests = args.requests or REQUESTS
    try:
        entries = entries_of(args) if args.trace is not None else []
    except (ValueError, OSError) as error:
        made.error(str(error))
    if entries and (wrong := too_long(args, entries, told)):
        made.error(wrong)
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
    print(f"{target.model} at {target.endpoint}; ms at p50/p90/p99")
    print(
        f"{'':>12} {'req/s':>7} {'out tok/s':>9} {'first token':>23} {'per token':>23} "
        f"{'between tokens':>23} {'tok/piece':>9} {'open':>6} {'errors':>6}"
    )
    results = {}
    for name, sessions in workloads(args, entries):
        print(plan(name, sessions), flush=True)
        records = run(target, sessions, args.processes)
        results[name] = result = {
            "sessions_per_second": rate_of(sessions),
            **summarize(
                records,
                warm=args.warm,
                most_first=None if args.good_first is None else args.good_first / 1e3,
                most_token=None if args.good_token is None else args.good_token / 1e3,
            ),
        }
        show(name, result, args.warm)
    if args.json:
        options = {k: v.text if isinstance(v, Lengths) else v for k, v in vars(args).items()}
        found = {"model": target.model, "options": options, "runs": results}
        print(json.dumps(plain(found), default=str))
    return 1 if any(result["errors"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
