"""Time to the first token with and without a cached prefix, with random weights on one GPU (B4).

    python benchmarks/prefix.py --shape qwen3-8b [--shared 8192] [--own 64] [--json]

A prompt of a long prefix and a short rest runs first with nothing of it in the prefix cache (a miss), then
with all of the prefix (a hit). The time runs from the submission to the token. The limit is that of the
operations of the tokens that run, or of reading all weights and the prefix's KV where that is more. With
`--batch N` so many prompts that share the prefix hit at once, and the time is that of the last one's token.

    python benchmarks/prefix.py --shape qwen3-8b --groups 50 --each 10

runs so many groups of prompts all at once, those of a group with a prefix in common, and tells how much of
them came from the cache, and their throughput with it and without.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from arguments import given, natural, positive
from engine_choices import engine_options, parsed
from prefix_groups import measure_groups
from tables import Table

from gpu import drain, fail, load, median, parser, run, started
from mizzen import LLM, SamplingParams
from mizzen.core.request import Request

NEEDED = "there is nothing to measure without the prefix cache"
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def first_tokens(llm: LLM, prompts: list[np.ndarray]) -> tuple[float, list[int]]:
    """Run prompts of one length; return the seconds until the last one's token, and their cached tokens."""
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
    """Do the same, and return of the cached tokens those of the prompt that had the fewest."""
    seconds, cached = first_tokens(llm, prompts)
    return seconds, min(cached)


def reusable(context: int, own: int, page_size: int) -> int:
    """Return the tokens of a hit that are in whole pages of the prefix; a prompt's last one always runs."""
    return min(context, context + own - 1) // page_size * page_size


def check_hit(llm: LLM, context: int, own: int, cached: int) -> None:
    """End where a hit was none: every whole page of the prefix has to come from the cache."""
    if cached < reusable(context, own, llm.options.page_size):
        fail(
            f"{cached} of {context} tokens of the prefix were in the cache, so that nothing hit them: "
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

        first_token(llm, [tokens(args.context + args.own)])  # lets the matrix products choose their kernels
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
        whole, start = args.context + args.own, reusable(args.context, args.own, llm.options.page_size)
        hits = limits.prefill(*[whole - start] * args.batch, start=start)
        results = {}
        for kind, least, count in (("miss", limits.prefill(whole), 1), ("hit", hits, args.batch)):
            share = table.row(name(args, kind, count), times[kind], least * 1e3, "ms")
            results[kind] = {"ms": median(times[kind]), "limit_ms": least * 1e3, "share": share}
        ratio = results["miss"]["ms"] / results["hit"]["ms"] if args.batch == 1 else None
        if ratio is not None:
            print(f"  a hit is {ratio:.1f} times as fast")
        return {"first_token": results, "ratio": ratio, **started(llm)}


def name(args: argparse.Namespace, kind: str, count: int) -> str:
    """Return a row's name."""
    work = f"{args.context} + {args.own}"
    return f"{work}, {kind}" if count == 1 else f"{count} x ({work}), {kind}"


def main() -> None:
    made = parser(__doc__, default="qwen3-8b")
    made.add_argument("--context", "--shared", type=positive, default=8192, help="tokens of the prefix")
    made.add_argument("--own", type=natural, default=64, help="tokens behind it")
    made.add_argument("--batch", type=positive, default=1, help="prompts that hit at once")
    made.add_argument("--groups", type=positive, help="measure so many groups, with the cache and without")
    made.add_argument("--each", type=positive, default=10, help="prompts of a group")
    args = parsed(made, context=512, own=16)
    options = engine_options(args)
    if args.groups is None and "each" in given(made):
        made.error("--each says how many prompts each of --groups has: give that, too")
    if args.groups and "batch" in given(made):
        made.error("--batch has no meaning with --groups, whose prompts all come at once: leave it out")
    if options["prefix_cache"] == "none":
        made.error(NEEDED)
    if not reusable(args.context, args.own, options["page_size"]):
        made.error(f"a prefix of --context {args.context} tokens fills no page of {options['page_size']}")
    run(args, measure, without={"prefix cache off": NEEDED})


if __name__ == "__main__":
    main()
