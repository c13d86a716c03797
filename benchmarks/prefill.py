"""Time of prompts alone, with random weights on one GPU (B3).

    python benchmarks/prefill.py --shape qwen3-8b [--work 16x1024 4x4096 1x8192 1x32768] [--json]

Each piece of work is so many prompts of so many tokens, each continued by one token; the time runs from the
submission to the last one's token. No prompt is in the prefix cache.
"""

from __future__ import annotations

import time

import numpy as np

from gpu import drain, finish, load, median, parser
from mizzen import LLM, SamplingParams
from mizzen.core.request import Request

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def run(llm: LLM, count: int, length: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, 10000, (count, length)).astype(np.int32)
    begin = time.perf_counter()
    for rid, prompt in enumerate(prompts):
        llm.engine.submit(Request(rid=rid, prompt=prompt, sampling=ONE))
    drain(llm)
    return time.perf_counter() - begin


def main() -> None:
    made = parser(__doc__, default="qwen3-8b")
    made.add_argument("--work", nargs="+", default=["16x1024", "4x4096", "1x8192", "1x32768"])
    args = made.parse_args()
    results = {}
    with load(args, max_running_requests=64, cuda_graph_max_batch=1) as (llm, limits):
        for seed, work in enumerate(args.work):
            count, length = (int(part) for part in work.split("x"))
            run(llm, count, length, seed)  # lets the matrix products choose their kernels
            rounds = [run(llm, count, length, 1000 * (seed + 1) + i) for i in range(args.rounds)]
            took, least = median(rounds), count * limits.prefill(length)
            rate = count * length / took
            results[work] = {"ms": took * 1e3, "limit_ms": least * 1e3, "share": least / took}
            print(
                f"{args.shape} {work:>8}: {took * 1e3:7.1f} ms ({rate:,.0f} tokens/s), "
                f"limit {least * 1e3:6.1f}: {least / took:.0%}"
            )
        finish(args, llm, {"prefill": results})


if __name__ == "__main__":
    main()
