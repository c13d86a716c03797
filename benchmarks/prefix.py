"""Time to the first token with and without a cached prefix, with random weights on one GPU (B4).

    python benchmarks/prefix.py --shape qwen3-8b [--shared 8192] [--own 64] [--json]

A prompt of a long prefix and a short rest runs first with nothing of it in the prefix cache (a miss), then
with all of the prefix (a hit). The time runs from the submission to the token. The limit is that of the
operations of the tokens that run, or of reading all weights once where that is more.
"""

from __future__ import annotations

import time

import numpy as np

from gpu import drain, finish, load, median, parser
from mizzen import LLM, SamplingParams
from mizzen.core.request import Request

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def first_token(llm: LLM, prompt: np.ndarray) -> float:
    """Return the seconds from a prompt's submission to its token."""
    begin = time.perf_counter()
    llm.engine.submit(Request(rid=0, prompt=prompt, sampling=ONE))
    while llm.engine.busy:
        output = llm.engine.step(0.0)
        if output is not None and len(output.rids):
            break
    seconds = time.perf_counter() - begin
    drain(llm)
    return seconds


def main() -> None:
    made = parser(__doc__, default="qwen3-8b")
    made.add_argument("--shared", type=int, default=8192, help="tokens of the prefix")
    made.add_argument("--own", type=int, default=64, help="tokens behind it")
    args = made.parse_args()
    if args.no_prefix_cache:
        made.error("there is nothing to measure without the prefix cache")
    with load(args, max_running_requests=8, cuda_graph_max_batch=1) as (llm, limits):
        rng = np.random.default_rng(0)

        def tokens(count: int) -> np.ndarray:
            return rng.integers(0, 10000, count).astype(np.int32)

        first_token(llm, tokens(args.shared + args.own))  # lets the matrix products choose their kernels
        times: dict[str, list[float]] = {"miss": [], "hit": []}
        for index in range(args.rounds + 1):
            prefix = tokens(args.shared)
            for kind in times:
                seconds = first_token(llm, np.concatenate([prefix, tokens(args.own)]))
                if index:  # the first round is warm-up
                    times[kind].append(seconds)
        weights = 2 * (limits.body + limits.head) / limits.bandwidth
        least = {
            "miss": limits.prefill(args.shared + args.own),
            "hit": max(weights, limits.prefill(args.own, args.shared)),
        }
        results = {}
        for kind, seconds in times.items():
            took = median(seconds)
            results[kind] = {"ms": took * 1e3, "limit_ms": least[kind] * 1e3, "share": least[kind] / took}
            print(
                f"{args.shape} {args.shared} + {args.own}, {kind:>4}: {took * 1e3:7.2f} ms, "
                f"limit {least[kind] * 1e3:6.2f}: {least[kind] / took:.0%}"
            )
        ratio = results["miss"]["ms"] / results["hit"]["ms"]
        print(f"a hit is {ratio:.1f} times as fast")
        finish(args, llm, {"first_token": results, "ratio": ratio})


if __name__ == "__main__":
    main()
