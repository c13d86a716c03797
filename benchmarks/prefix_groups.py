"""Groups of prompts that share a prefix, all given at once, with the prefix cache and without (B4)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from engine_choices import varied
from limits import Limits
from tables import Table

from gpu import load, median, started
from mizzen import LLM

MOST_RUNNING = 256
Run = Callable[[LLM, list[np.ndarray]], tuple[float, list[int]]]
"""Runs prompts; returns the seconds until the last one's token, and each one's cached tokens."""


def grouped(args: argparse.Namespace, highest: int, seed: int) -> list[np.ndarray]:
    """Draw all prompts, first one of every group, then the next of each."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, highest, (args.groups, args.context)).astype(np.int32)
    owns = rng.integers(0, highest, (args.each, args.groups, args.own)).astype(np.int32)
    return [np.concatenate(pair) for row in owns for pair in zip(prefixes, row, strict=True)]


def least(args: argparse.Namespace, limits: Limits, *, cached: bool) -> float:
    """Return the seconds of all prompts at least.

    With the cache all but the first of a group run their own tokens alone, in steps behind the first one's.
    """
    whole, rests = [args.context + args.own] * args.groups, [args.own] * (args.groups * (args.each - 1))
    if not cached or not rests:
        return limits.prefill(*whole * args.each)
    return limits.prefill(*whole) + limits.prefill(*rests, start=args.context)


def measure_groups(args: argparse.Namespace, table: Table, run: Run) -> dict[str, Any]:
    """Measure with the cache, then without."""
    count = args.groups * args.each
    tokens = count * (args.context + args.own)
    results: dict[str, Any] = {}
    told: dict[str, Any] = {}
    for name in ("cached", "not cached"):
        chosen = args if name == "cached" else varied(args, "prefix cache off")
        running = min(count, MOST_RUNNING)
        with load(chosen, max_running_requests=running, cuda_graph_max_batch=1) as (llm, limits):
            highest = min(limits.config.vocab_size, 10000)
            rounds = [run(llm, grouped(args, highest, seed)) for seed in range(args.rounds + 1)]
            rounds = rounds[1:]  # the first round is warm-up
            rates = [tokens / seconds for seconds, _ in rounds]
            hit = median([sum(cached) / tokens for _, cached in rounds])
            best = tokens / least(args, limits, cached=name == "cached")
            work = f"{args.groups} x {args.each}, {name}"
            share = table.row(work, rates, best, "tok/s", f"{hit:.1%} of the prompts' tokens from the cache")
            rate = median(rates)
            results[name] = {"tokens_per_second": rate, "limit": best, "share": share, "hit_share": hit}
            told = told or started(llm)
    ratio = results["cached"]["tokens_per_second"] / results["not cached"]["tokens_per_second"]
    print(f"  with the cache {ratio:.1f} times as many tokens a second")
    return {"groups": results, "ratio": ratio, **told}
