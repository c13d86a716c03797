# SPDX-License-Identifier: Apache-2.0
"""Time to the first token with and without a cached prefix, with random weights on one GPU.

    python benchmarks/prefix.py --shape qwen3-8b [--shared 8192] [--own 64] [--json]

First, a prompt with a long prefix and a short rest runs while no part of it is in the prefix cache (a miss).
Then a prompt runs with the same prefix and another rest, so that its whole prefix is cached (a hit). The time
runs from the submission to the first token. The limit is the time for the operations of the computed tokens
or the time to read all weights and the KV of the prefix, whichever is longer. With `--batch N`, N prompts
that share the prefix run at once as hits, and the time runs to the last prompt's token.

    python benchmarks/prefix.py --shape qwen3-8b --groups 50 --each 10

This runs 50 groups of 10 prompts, all at once; the prompts of a group share a prefix. It reports the share of
prompt tokens that came from the prefix cache, and the throughput with and without the cache.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from common_parts.arguments import given_options, natural, positive
from common_parts.engine_options import engine_options, parse_checked_args
from common_parts.gpu import benchmark_parser, drain, fail, load, median, print_startup, run
from common_parts.prefix_groups import measure_groups
from common_parts.tables import Table

from mizzen import LLM, SamplingParams
from mizzen.core.request import Request

NEEDED = "there is nothing to measure without the prefix cache"
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def first_tokens(llm: LLM, prompts: list[np.ndarray]) -> tuple[float, list[int]]:
    """Run prompts of equal length.

    Returns:
        The seconds until the last token, and the number of cached tokens of each prompt.
    """
    begin = time.perf_counter()
    for rid, prompt in enumerate(prompts):
        llm.engine.submit(Request(rid=rid, prompt=prompt, sampling=ONE))
    cached: list[int] = []
    while llm.engine.busy and len(cached) < len(prompts):
        output = llm.engine.step(0.0)
        cached += () if output is None else (ended.cached_tokens for ended in output.finished)
    seconds = time.perf_counter() - begin
    drain(llm, f"{len(prompts)} of {len(prompts[0])} tokens")
    return seconds, cached


def first_token(llm: LLM, prompts: list[np.ndarray]) -> tuple[float, int]:
    """Run prompts like `first_tokens`.

    Returns:
        The seconds until the last token, and the lowest number of cached tokens of any prompt.
    """
    seconds, cached = first_tokens(llm, prompts)
    return seconds, min(cached)


def reusable(context: int, own: int, page_size: int) -> int:
    """Return the number of prefix tokens that a hit reuses.

    Only whole pages of the prefix, which has `context` tokens, are reused. The last token of a prompt is
    never reused. This matters if `own`, the number of tokens after the prefix, is 0.
    """
    return min(context, context + own - 1) // page_size * page_size


def check_hit(llm: LLM, context: int, own: int, cached: int) -> None:
    """Exit with an error unless all whole pages of the prefix came from the cache."""
    if cached < reusable(context, own, llm.options.page_size):
        fail(
            f"only {cached} of {context} tokens of the prefix were in the cache, so this was not a hit: "
            "lower --context or --batch, or raise --engine kv_cache_tokens"
        )


def measure(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Measure misses and hits, or groups."""
    if args.groups:
        return measure_groups(args, table, first_tokens)
    with load(args, max_running_requests=max(8, args.batch), cuda_graph_max_batch=1) as (llm, limits):
        rng = np.random.default_rng(0)
        highest = min(limits.config.vocab_size, 10000)

        def tokens(count: int) -> np.ndarray:
            return rng.integers(0, highest, count).astype(np.int32)

        first_token(llm, [tokens(args.context + args.own)])  # lets the GEMMs select their kernels
        times: dict[str, list[float]] = {"miss": [], "hit": []}
        for index in range(args.rounds + 1):
            prefix = tokens(args.context)
            for kind, count in (("miss", 1), ("hit", args.batch)):
                prompts = [np.concatenate([prefix, tokens(args.own)]) for _ in range(count)]
                seconds, cached = first_token(llm, prompts)
                if kind == "hit":
                    check_hit(llm, args.context, args.own, cached)
                if index:  # the first round is warm-up
                    times[kind].append(seconds * 1e3)
        length, start = args.context + args.own, reusable(args.context, args.own, llm.options.page_size)
        hits = limits.prefill(*[length - start] * args.batch, start=start)
        results = {}
        for kind, least, count in (("miss", limits.prefill(length), 1), ("hit", hits, args.batch)):
            share = table.row(row_name(args, kind, count), times[kind], least * 1e3, "ms")
            results[kind] = {"ms": median(times[kind]), "limit_ms": least * 1e3, "share": share}
        ratio = results["miss"]["ms"] / results["hit"]["ms"] if args.batch == 1 else None
        if ratio is not None:
            print(f"  a hit is {ratio:.1f} times as fast as a miss")
        return {"first_token": results, "ratio": ratio, **print_startup(llm)}


def row_name(args: argparse.Namespace, kind: str, count: int) -> str:
    """Return the name of a table row."""
    work = f"{args.context} + {args.own}"
    return f"{work}, {kind}" if count == 1 else f"{count} x ({work}), {kind}"


def main() -> None:
    parser = benchmark_parser(__doc__, default="qwen3-8b")
    parser.add_argument("--context", "--shared", type=positive, default=8192, help="tokens of the prefix")
    parser.add_argument("--own", type=natural, default=64, help="tokens of each prompt after the prefix")
    parser.add_argument("--batch", type=positive, default=1, help="prompts that hit at once")
    parser.add_argument(
        "--groups", type=positive, help="measure this number of groups, with and without the prefix cache"
    )
    parser.add_argument("--each", type=positive, default=10, help="prompts per group")
    args = parse_checked_args(parser, context=512, own=16)
    options = engine_options(args)
    if args.groups is None and "each" in given_options(parser):
        parser.error("--each is the number of prompts per group: give --groups, too")
    if args.groups and "batch" in given_options(parser):
        parser.error("--batch has no effect with --groups, whose prompts all start at once: leave it out")
    if options["prefix_cache"] == "none":
        parser.error(NEEDED)
    if not reusable(args.context, args.own, options["page_size"]):
        parser.error(
            f"a prefix of --context {args.context} tokens does not fill a page of {options['page_size']}"
        )
    run(args, measure, without={"prefix cache off": NEEDED})


if __name__ == "__main__":
    main()
