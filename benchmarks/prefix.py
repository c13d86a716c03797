"""Time to the first token with and without a cached prefix, with random weights on one GPU (B4).

    python benchmarks/prefix.py --shape qwen3-8b [--shared 8192] [--own 64] [--json]

A prompt of a long prefix and a short rest runs first with nothing of it in the prefix cache (a miss), then
with all of the prefix (a hit). The time runs from the submission to the token. The limit is that of the
operations of the tokens that run, or of reading all weights once where that is more. With `--batch N` so many
prompts that share the prefix hit at once, and the time is that of the last one's token.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from gpu import Table, drain, load, median, parser, run, started
from mizzen import LLM, SamplingParams
from mizzen.core.request import Request

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def first_token(llm: LLM, prompts: list[np.ndarray]) -> float:
    """Return the seconds from the submission of prompts to the last one's token."""
    begin = time.perf_counter()
    for rid, prompt in enumerate(prompts):
        llm.engine.submit(Request(rid=rid, prompt=prompt, sampling=ONE))
    came = 0
    while llm.engine.busy and came < len(prompts):
        output = llm.engine.step(0.0)
        came += 0 if output is None else len(output.rids)
    seconds = time.perf_counter() - begin
    drain(llm)
    return seconds


def measure(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Measure misses and hits."""
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
                seconds = first_token(llm, prompts)
                if index:  # the first round is warm-up
                    times[kind].append(seconds)
        own = args.batch * limits.prefill(args.own, args.context)
        least = {"miss": limits.prefill(args.context + args.own), "hit": max(limits.weights_read(), own)}
        results = {}
        for kind, seconds in times.items():
            took = median(seconds)
            work = f"{args.context} + {args.own}, {kind}"
            share = table.row(work, took * 1e3, least[kind] * 1e3, "ms")
            results[kind] = {"ms": took * 1e3, "limit_ms": least[kind] * 1e3, "share": share}
        ratio = results["miss"]["ms"] / results["hit"]["ms"]
        print(f"  a hit is {ratio:.1f} times as fast")
        return {"first_token": results, "ratio": ratio, **started(llm)}


def main() -> None:
    made = parser(__doc__, default="qwen3-8b")
    made.add_argument("--context", "--shared", type=int, default=8192, help="tokens of the prefix")
    made.add_argument("--own", type=int, default=64, help="tokens behind it")
    made.add_argument("--batch", type=int, default=1, help="prompts that hit at once")
    args = made.parse_args()
    if args.no_prefix_cache:
        made.error("there is nothing to measure without the prefix cache")
    run(args, measure, without=("prefix cache off",))


if __name__ == "__main__":
    main()
