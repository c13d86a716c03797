# SPDX-License-Identifier: Apache-2.0
"""Throughput of 256 requests submitted at once, with random weights on one GPU.

    python benchmarks/offline.py --shape qwen3-0.6b [--json]

The prompts have 100 to 1,024 random tokens each, and 100 to 1,024 tokens are generated for each at
temperature 0.6, ignoring end tokens: 142,827 prompt tokens and 133,966 output tokens in total. Every round
has new prompts of the same lengths, so that the prefix cache does not help; the first round is not measured.
The limit is the sum of the limits of all steps: the prefill of all prompts, and as many decode steps as the
longest output has tokens, each with the rows that are left and their context. `--batch` sets another number
of requests, `--running` how many of them run together, and `--context` and `--output` the lengths of prompts
and outputs or their distributions:

    python benchmarks/offline.py --shape qwen3-8b --batch 1000 --running 256 --context "U(100,1024)" \\
        --output "N(300,100)"
"""

from __future__ import annotations

import argparse
import math
import random
import time
from typing import Any

import numpy as np
from common_parts.arguments import positive
from common_parts.engine_options import parse_checked_args
from common_parts.gpu import benchmark_parser, fail, load, median, print_startup, run, token_bound
from common_parts.lengths import Lengths
from common_parts.lengths import lengths as length_distribution
from common_parts.limits import Limits
from common_parts.tables import Table

from mizzen import LLM, SamplingParams

SEQUENCES = 256
SHORTEST, LONGEST = 100, 1024
VOCABULARY = 10000
PROMPT_TOKENS, OUTPUT_TOKENS = 142_827, 133_966


def lengths(args: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Return the length in tokens of each request's prompt, and the length of each request's output."""
    random.seed(0)
    prompts = []
    for _ in range(args.batch):
        count = random.randint(SHORTEST, LONGEST)
        for _ in range(count):
            random.randint(0, VOCABULARY)
        prompts.append(count)
    outputs = [random.randint(SHORTEST, LONGEST) for _ in range(args.batch)]
    if args.batch == SEQUENCES and (sum(prompts), sum(outputs)) != (PROMPT_TOKENS, OUTPUT_TOKENS):
        raise RuntimeError(
            f"the workload differs from its definition: {sum(prompts)} and {sum(outputs)} tokens"
        )
    generator = np.random.default_rng(0)
    return (
        args.context.draw(generator, args.batch) if args.context else prompts,
        args.output.draw(generator, args.batch) if args.output else outputs,
    )


def limit(limits: Limits, prompts: list[int], outputs: list[int], running: int) -> tuple[float, float]:
    """Return the minimum seconds of the workload without collectives, and of its collectives.

    At most `running` requests decode together; a request begins as soon as another one has ended.
    """
    total = limits.prefill(*prompts)
    communication = sum(limits.collectives(count, 1) for count in prompts)
    left, context = np.array(outputs) - 1, np.array(prompts)
    while len(left := left[(unfinished := left > 0)]):
        context = context[unfinished]
        rows = min(running, len(left))
        left[:rows] -= 1
        context[:rows] += 1
        total += limits.decode(rows, float(context[:rows].mean()))
        communication += limits.collectives(rows, rows)
    return total, communication


def check_room(llm: LLM, prompts: list[int], outputs: list[int]) -> None:
    """Exit if a prompt and its output together are longer than a request may be."""
    longest = max(range(len(prompts)), key=lambda at: prompts[at] + outputs[at])
    if prompts[longest] + outputs[longest] <= llm.engine.info.context_length:
        return
    bound, more = token_bound(llm)
    request = f"a prompt of {prompts[longest]} and an answer of {outputs[longest]} tokens"
    fail(f"{request} exceed {bound}: {', or '.join(filter(None, ['lower --context or --output', more]))}")


def answer(llm: LLM, prompts: list[int], outputs: list[int], seed: int) -> float:
    """Generate outputs for random prompts; return the seconds that this takes.

    `prompts` and `outputs` are the lengths of the prompts and of their outputs, in tokens.
    """
    rng = np.random.default_rng(seed)
    highest = min(llm.engine.info.vocab_size, VOCABULARY)
    ids = [rng.integers(0, highest, count).tolist() for count in prompts]
    params = [SamplingParams(temperature=0.6, max_tokens=count, ignore_eos=True) for count in outputs]
    begin = time.perf_counter()
    answers = llm.generate(ids, params, progress=False)
    seconds = time.perf_counter() - begin
    if [len(answer.token_ids) for answer in answers] != outputs:
        raise RuntimeError("an answer ended early")
    return seconds


def note_of(limits: Limits, seconds: list[float], least: float, communication: float) -> str:
    """Return the note of the table's row: the seconds of the rounds and of the limit."""
    note = f"rounds {', '.join(f'{s:.2f}' for s in seconds)} s"
    if math.isnan(least):
        return note
    note += f", limit {least:.2f}"
    if limits.gpus > 1:
        total = least + communication
        note += f", {total:.2f} with collectives: {total / median(seconds):.0%}"
    return note


def measure_rounds(
    llm: LLM,
    limits: Limits,
    table: Table,
    *,
    prompts: list[int],
    outputs: list[int],
    running: int,
    rounds: int,
) -> dict[str, Any]:
    """Run the workload once to warm up, then once per round; return the figures.

    Args:
        llm: the engine; `running` requests can run at once.
        limits: its limits.
        table: the table that gets the row.
        prompts: tokens of each prompt.
        outputs: tokens of each output.
        running: maximum number of requests that run together.
        rounds: number of rounds, whose median counts.
    """
    check_room(llm, prompts, outputs)
    answer(llm, prompts, outputs, seed=rounds)
    seconds = [answer(llm, prompts, outputs, seed) for seed in range(rounds)]
    least, communication = limit(limits, prompts, outputs, running)
    rates, best = [sum(outputs) / took for took in seconds], sum(outputs) / least
    note = note_of(limits, seconds, least, communication)
    together = "at once" if running == len(prompts) else f"({running} at once)"
    share = table.row(f"{len(prompts)} requests {together}", rates, best, "tok/s", note)
    with_collectives = sum(outputs) / (least + communication)
    return {
        "seconds": seconds, "tokens_per_second": median(rates), "limit": best, "share": share,
        "limit_with_collectives": with_collectives,
    }  # fmt: skip


def measure(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Run the workload once to warm up, then once per round."""
    prompts, outputs = lengths(args)
    running = min(args.batch, args.running or args.batch)
    with load(args, max_running_requests=running) as (llm, limits):
        figures = measure_rounds(
            llm, limits, table, prompts=prompts, outputs=outputs, running=running, rounds=args.rounds
        )
        return figures | print_startup(llm)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--batch", type=positive, default=SEQUENCES, help="number of requests")
    parser.add_argument(
        "--running", type=positive, help="maximum number of requests that run together; by default all"
    )
    parser.add_argument(
        "--context", type=length_distribution, help="tokens of each prompt; by default those of the workload"
    )
    parser.add_argument(
        "--output", type=length_distribution, help="tokens of each output; by default those of the workload"
    )
    small = {"batch": 8, "context": Lengths("32"), "output": Lengths("16")}
    run(parse_checked_args(parser, {"running": "max_running_requests"}, **small), measure)


if __name__ == "__main__":
    main()
