"""Throughput of 256 requests given at once, with random weights on one GPU (B1).

    python benchmarks/offline.py --shape qwen3-0.6b [--json]

Prompts of 100 to 1024 random tokens are continued by 100 to 1024 tokens each at temperature 0.6, end tokens
ignored: 142,827 prompt tokens and 133,966 output tokens. Every round has new prompts of the same lengths, so
that none is in the prefix cache. The limit adds the steps' limits: all prompts by operations, and as many
decode steps as the longest output, each with the rows and the context that are left then.
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

from gpu import Limits, finish, load, median, parser
from mizzen import LLM, SamplingParams

SEQUENCES = 256
SHORTEST, LONGEST = 100, 1024
VOCABULARY = 10000
PROMPT_TOKENS, OUTPUT_TOKENS = 142_827, 133_966


def lengths() -> tuple[list[int], list[int]]:
    """Draw the workload's lengths, in the order that the workload's definition draws them and the ids."""
    random.seed(0)
    prompts = []
    for _ in range(SEQUENCES):
        count = random.randint(SHORTEST, LONGEST)
        for _ in range(count):
            random.randint(0, VOCABULARY)
        prompts.append(count)
    outputs = [random.randint(SHORTEST, LONGEST) for _ in range(SEQUENCES)]
    if (sum(prompts), sum(outputs)) != (PROMPT_TOKENS, OUTPUT_TOKENS):
        raise RuntimeError(f"another workload was drawn: {sum(prompts)} and {sum(outputs)} tokens")
    return prompts, outputs


def limit(limits: Limits, prompts: list[int], outputs: list[int]) -> float:
    """Seconds that the workload takes at least."""
    left, done = np.array(outputs), np.array(prompts)
    total = sum(limits.prefill(count) for count in prompts)
    for step in range(1, max(outputs)):
        rows = left > step
        total += limits.decode(int(rows.sum()), float(done[rows].mean() + step))
    return total


def run(llm: LLM, prompts: list[int], outputs: list[int], seed: int) -> float:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, VOCABULARY, count).tolist() for count in prompts]
    params = [SamplingParams(temperature=0.6, max_tokens=count, ignore_eos=True) for count in outputs]
    begin = time.perf_counter()
    answers = llm.generate(ids, params, progress=False)
    seconds = time.perf_counter() - begin
    if [len(answer.token_ids) for answer in answers] != outputs:
        raise RuntimeError("an answer has another length than asked for")
    return seconds


def main() -> None:
    args = parser(__doc__).parse_args()
    prompts, outputs = lengths()
    with load(args, max_running_requests=SEQUENCES) as (llm, limits):
        llm.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=8, ignore_eos=True), progress=False)
        seconds = [run(llm, prompts, outputs, seed) for seed in range(args.rounds)]
        took, least = median(seconds), limit(limits, prompts, outputs)
        rate, best = OUTPUT_TOKENS / took, OUTPUT_TOKENS / least
        print(
            f"{args.shape}: {rate:,.0f} output tokens/s ({took:.2f} s), limit {best:,.0f} ({least:.2f} s): "
            f"{rate / best:.0%}; rounds {', '.join(f'{s:.2f}' for s in seconds)} s"
        )
        results: dict[str, Any] = {"tokens_per_second": rate, "limit": best, "share": rate / best}
        finish(args, llm, {"seconds": seconds, **results})


if __name__ == "__main__":
    main()
