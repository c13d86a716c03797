"""Throughput of 256 requests given at once, with random weights on one GPU (B1).

    python benchmarks/offline.py --shape qwen3-0.6b [--json]

Prompts of 100 to 1024 random tokens are continued by 100 to 1024 tokens each at temperature 0.6, end tokens
ignored: 142,827 prompt tokens and 133,966 output tokens. Every round has new prompts of the same lengths, so
that none is in the prefix cache. The limit adds the steps' limits: all prompts by operations, and as many
decode steps as the longest output, each with the rows and the context that are left then. `--batch` and
`--context` run another number of requests, or prompts of one length; `--output` answers of one length.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from typing import Any

import numpy as np
from arguments import positive
from engine_choices import parsed
from limits import Limits

from gpu import Table, fail, load, median, parser, run, started
from mizzen import LLM, SamplingParams

SEQUENCES = 256
SHORTEST, LONGEST = 100, 1024
VOCABULARY = 10000
PROMPT_TOKENS, OUTPUT_TOKENS = 142_827, 133_966


def lengths(args: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Draw the workload's lengths, in the order that the workload's definition draws them and the ids."""
    random.seed(0)
    prompts = []
    for _ in range(args.batch):
        count = random.randint(SHORTEST, LONGEST)
        for _ in range(count):
            random.randint(0, VOCABULARY)
        prompts.append(count)
    outputs = [random.randint(SHORTEST, LONGEST) for _ in range(args.batch)]
    if args.batch == SEQUENCES and (sum(prompts), sum(outputs)) != (PROMPT_TOKENS, OUTPUT_TOKENS):
        raise RuntimeError(f"another workload was drawn: {sum(prompts)} and {sum(outputs)} tokens")
    return (
        [args.context] * args.batch if args.context else prompts,
        [args.output] * args.batch if args.output else outputs,
    )


def limit(limits: Limits, prompts: list[int], outputs: list[int]) -> tuple[float, float]:
    """Seconds that the workload takes at least, and those of collectives besides."""
    left, done = np.array(outputs), np.array(prompts)
    total = sum(limits.prefill(count) for count in prompts)
    told = sum(limits.collectives(count, 1) for count in prompts)
    for step in range(1, max(outputs)):
        rows = left > step
        total += limits.decode(int(rows.sum()), float(done[rows].mean() + step))
        told += limits.collectives(int(rows.sum()), int(rows.sum()))
    return total, told


def answer(llm: LLM, prompts: list[int], outputs: list[int], seed: int) -> float:
    rng = np.random.default_rng(seed)
    highest = min(llm.engine.info.vocab_size, VOCABULARY)
    ids = [rng.integers(0, highest, count).tolist() for count in prompts]
    params = [SamplingParams(temperature=0.6, max_tokens=count, ignore_eos=True) for count in outputs]
    begin = time.perf_counter()
    try:
        answers = llm.generate(ids, params, progress=False)
    except ValueError as error:  # before anything ran
        fail(f"{error}: lower --context, or raise --engine kv_cache_tokens")
    seconds = time.perf_counter() - begin
    if [len(answer.token_ids) for answer in answers] != outputs:
        room = llm.engine.info.context_length
        fail(f"an answer ended early, for it and its prompt may have {room} tokens: lower --output")
    return seconds


def measure(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Run the workload several times."""
    prompts, outputs = lengths(args)
    with load(args, max_running_requests=args.batch) as (llm, limits):
        llm.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=8, ignore_eos=True), progress=False)
        seconds = [answer(llm, prompts, outputs, seed) for seed in range(args.rounds)]
        took, (least, shared) = median(seconds), limit(limits, prompts, outputs)
        rate, best = sum(outputs) / took, sum(outputs) / least
        told = f"rounds {', '.join(f'{s:.2f}' for s in seconds)} s"
        if not math.isnan(least):
            told += f", limit {least:.2f}"
        if limits.gpus > 1 and not math.isnan(least):
            told += f", {least + shared:.2f} with collectives: {(least + shared) / took:.0%}"
        share = table.row(f"{args.batch} requests at once", rate, best, "tok/s", told)
        return {
            "seconds": seconds, "tokens_per_second": rate, "limit": best, "share": share,
            "limit_with_collectives": sum(outputs) / (least + shared), **started(llm),
        }  # fmt: skip


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--batch", type=positive, default=SEQUENCES, help="requests")
    made.add_argument("--context", type=positive, help="tokens of every prompt")
    made.add_argument("--output", type=positive, help="tokens of every answer")
    run(parsed(made, batch=8, context=32, output=16), measure)


if __name__ == "__main__":
    main()
