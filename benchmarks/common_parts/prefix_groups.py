# SPDX-License-Identifier: Apache-2.0
"""Throughput of groups of prompts that share a prefix, with and without the prefix cache.

`prefix.py` uses this for `--groups`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from common_parts.engine_options import with_variant
from common_parts.gpu import load, median, print_startup
from common_parts.limits import Limits
from common_parts.tables import Table
from mizzen import LLM

MOST_RUNNING = 256
Run = Callable[[LLM, list[np.ndarray]], tuple[float, list[int]]]
"""Function that runs prompts.

It returns the seconds until the last token, and the number of cached tokens of each prompt.
"""


def draw_prompts(args: argparse.Namespace, highest: int, seed: int) -> list[np.ndarray]:
    """Return random prompts: the first prompt of every group, then the second prompt of every group, ..."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, highest, (args.groups, args.context)).astype(np.int32)
    owns = rng.integers(0, highest, (args.each, args.groups, args.own)).astype(np.int32)
    return [np.concatenate(pair) for row in owns for pair in zip(prefixes, row, strict=True)]


def least_seconds(args: argparse.Namespace, limits: Limits, *, cached: bool) -> float:
    """Return the minimum seconds for all prompts together.

    With the cache, the first prompt of each group is computed completely; after that, all other prompts
    compute only the tokens that follow the prefix.
    """
    full, rests = [args.context + args.own] * args.groups, [args.own] * (args.groups * (args.each - 1))
    if not cached or not rests:
        return limits.prefill(*full * args.each)
    return limits.prefill(*full) + limits.prefill(*rests, start=args.context)


def measure_groups(args: argparse.Namespace, table: Table, run: Run) -> dict[str, Any]:
    """Measure all groups with the prefix cache, then without it."""
    count = args.groups * args.each
    tokens = count * (args.context + args.own)
    results: dict[str, Any] = {}
    start_up: dict[str, Any] = {}
    for name in ("cached", "not cached"):
        chosen = args if name == "cached" else with_variant(args, "prefix cache off")
        running = min(count, MOST_RUNNING)
        with load(chosen, max_running_requests=running, cuda_graph_max_batch=1) as (llm, limits):
            highest = min(limits.config.vocab_size, 10000)
            rounds = [run(llm, draw_prompts(args, highest, seed)) for seed in range(args.rounds + 1)]
            rounds = rounds[1:]  # the first round is warm-up
            rates = [tokens / seconds for seconds, _ in rounds]
            hit = median([sum(cached) / tokens for _, cached in rounds])
            best = tokens / least_seconds(args, limits, cached=name == "cached")
            work = f"{args.groups} x {args.each}, {name}"
            share = table.row(work, rates, best, "tok/s", f"{hit:.1%} of prompt tokens from the cache")
            rate = median(rates)
            results[name] = {"tokens_per_second": rate, "limit": best, "share": share, "hit_share": hit}
            start_up = start_up or print_startup(llm)
    ratio = results["cached"]["tokens_per_second"] / results["not cached"]["tokens_per_second"]
    print(f"  {ratio:.1f} times as many tokens a second with the cache")
    return {"groups": results, "ratio": ratio, **start_up}
