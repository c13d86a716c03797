"""Time between tokens of running streams while long prompts arrive, with random weights on one GPU (B6).

    python benchmarks/mixed.py --shape qwen3-8b [--streams 32] [--prompt 8192] [--prompts 8] [--json]

Streams decode all the while; long prompts arrive one after the other, each as soon as the one before has its
token. The times between two tokens of a stream are told at p50, p90 and p99, and the prompts' mean rate. What
cuts a prompt to pieces is `--max-step-milliseconds`.
"""

from __future__ import annotations

import time

import numpy as np

from gpu import drain, finish, load, parser
from mizzen import LLM, SamplingParams
from mizzen.core.request import Request


def submit(llm: LLM, rid: int, prompt: np.ndarray, outputs: int) -> None:
    sampling = SamplingParams(temperature=0.6, max_tokens=outputs, ignore_eos=True)
    llm.engine.submit(Request(rid=rid, prompt=prompt, sampling=sampling, seed=rid))


def run(
    llm: LLM, streams: int, prompts: list[np.ndarray], rng: np.random.Generator
) -> tuple[list[float], float]:
    """Return the seconds between tokens of a stream while prompts ran, and the seconds that these took."""
    for rid in range(streams):
        submit(llm, rid, rng.integers(0, 10000, 200).astype(np.int32), 20_000)
    seen: dict[int, float] = {}
    while len(seen) < streams:
        output = llm.engine.step(time.monotonic())
        seen.update(dict.fromkeys(output.rids.tolist() if output is not None else (), time.perf_counter()))
    gaps: list[float] = []
    begin, done = time.perf_counter(), 0
    submit(llm, streams, prompts[0], 1)
    while done < len(prompts):
        output = llm.engine.step(time.monotonic())
        llm.engine.take_cache_events()
        if output is None:
            continue
        now = time.perf_counter()
        for rid in output.rids.tolist():
            if rid < streams:
                gaps.append(now - seen[rid])
                seen[rid] = now
            else:
                done += 1
                if done < len(prompts):
                    submit(llm, streams + done, prompts[done], 1)
    seconds = time.perf_counter() - begin
    for rid in range(streams):
        llm.engine.abort(rid)
    drain(llm)
    return gaps, seconds


def main() -> None:
    made = parser(__doc__, default="qwen3-8b")
    made.add_argument("--streams", type=int, default=32)
    made.add_argument("--prompt", type=int, default=8192, help="tokens of a prompt")
    made.add_argument("--prompts", type=int, default=8)
    made.add_argument("--max-step-milliseconds", type=float, default=25.0)
    args = made.parse_args()
    results = []
    with load(
        args, max_running_requests=args.streams + 8, max_step_milliseconds=args.max_step_milliseconds
    ) as (llm, _):
        rng = np.random.default_rng(0)
        for index in range(args.rounds + 1):
            prompts = list(rng.integers(0, 10000, (args.prompts, args.prompt)).astype(np.int32))
            gaps, seconds = run(llm, args.streams, prompts, rng)
            p50, p90, p99 = (float(np.percentile(gaps, q)) * 1e3 for q in (50, 90, 99))
            rate = args.prompts * args.prompt / seconds
            if not index:  # warm-up
                continue
            results.append({"p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "prompt_tokens_per_second": rate})
            print(
                f"{args.shape}, {args.streams} streams, ms between tokens: p50 {p50:.1f}, p90 {p90:.1f}, "
                f"p99 {p99:.1f} ({p99 / p50:.2f} times p50); prompts {rate:,.0f} tokens/s"
            )
        finish(args, llm, {"rounds": results})


if __name__ == "__main__":
    main()
