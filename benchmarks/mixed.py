# SPDX-License-Identifier: Apache-2.0
"""Time between tokens of running streams while long prompts arrive, with random weights on one GPU.

    python benchmarks/mixed.py --shape qwen3-8b [--streams 32] [--prompt 8192] [--prompts 8] [--json]

Streams decode continuously. Long prompts arrive one after another, each as soon as the previous prompt has
its output token. The results are p50, p90 and p99 of the time between tokens of a stream, and the mean
rate of prompt tokens. `--max-step-milliseconds` determines the size of prefill chunks. The limit of the time
between tokens is the minimum time of a step that only decodes the streams. The limit of the rate is the
maximum rate of prefill without streams.

    python benchmarks/mixed.py --one-step --batch 256 --context 1024 [--chunk-tokens 128 512 2048]

With `--one-step`, the benchmark times single steps with decodes and a chunk instead, for several ways to run
their attention. For each of them it prints the chunk size to which `--max-step-milliseconds` leads.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from common_parts import mixed_step
from common_parts.arguments import natural, number, positive
from common_parts.engine_options import parse_checked_args
from common_parts.gpu import benchmark_parser, check_ended, drain, fail, load, median, print_startup, run
from common_parts.tables import Table

from mizzen import LLM, SamplingParams
from mizzen.core.outputs import StepOutput
from mizzen.core.request import Request

START = 200
"""Number of prompt tokens of a stream."""
OUTPUTS = 20_000
"""Maximum number of output tokens of a stream, more than a stream generates while the prompts run."""
SHORTEN = "use fewer --streams or fewer and shorter --prompts, or raise --engine kv_cache_tokens"


def submit(llm: LLM, rid: int, prompt: np.ndarray, outputs: int) -> None:
    """Submit a request that generates `outputs` tokens."""
    sampling = SamplingParams(temperature=0.6, max_tokens=outputs, ignore_eos=True)
    llm.engine.submit(Request(rid=rid, prompt=prompt, sampling=sampling, seed=rid))


def step(llm: LLM, streams: int) -> StepOutput | None:
    """Run a step; exit if a prompt was rejected or a stream ended during the measurement."""
    if not llm.engine.busy:
        fail(f"the engine is idle although {streams} streams should run: {SHORTEN}")
    output = llm.engine.step(time.monotonic())
    check_ended(llm, f"prompts with {streams} streams")
    llm.engine.drain_cache_events()
    for ended in output.finished if output is not None else ():
        if ended.rid < streams:
            fail(f"a stream ended after {ended.output_tokens} tokens, before the prompts: {SHORTEN}")
    return output


def run_streams(
    llm: LLM, streams: int, prompts: list[np.ndarray], rng: np.random.Generator
) -> tuple[list[float], float]:
    """Run streams and prompts; return times between tokens, and the time for all prompts, in seconds.

    Times between tokens are the times between any two successive tokens of one stream, for all streams.
    """
    highest = min(llm.engine.info.vocab_size, 10000)
    for rid in range(streams):
        submit(llm, rid, rng.integers(0, highest, START).astype(np.int32), OUTPUTS)
    last_token: dict[int, float] = {}
    while len(last_token) < streams:
        output = step(llm, streams)
        last_token.update(
            dict.fromkeys(output.rids.tolist() if output is not None else (), time.perf_counter())
        )
    gaps: list[float] = []
    begin, done = time.perf_counter(), 0
    submit(llm, streams, prompts[0], 1)
    while done < len(prompts):
        output = step(llm, streams)
        if output is None:
            continue
        now = time.perf_counter()
        for rid in output.rids.tolist():
            if rid < streams:
                gaps.append(now - last_token[rid])
                last_token[rid] = now
            else:
                done += 1
                if done < len(prompts):
                    submit(llm, streams + done, prompts[done], 1)
    seconds = time.perf_counter() - begin
    for rid in range(streams):
        llm.engine.abort(rid)
    drain(llm, "streams")
    return gaps, seconds


def measure(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Measure several rounds; return the median of each figure."""
    rounds: list[dict[str, float]] = []
    with load(
        args, max_running_requests=args.batch + 8, max_step_milliseconds=args.max_step_milliseconds
    ) as (llm, limits):
        rng = np.random.default_rng(0)
        highest = min(limits.config.vocab_size, 10000)
        for index in range(args.rounds + 1):
            prompts = list(rng.integers(0, highest, (args.prompts, args.context)).astype(np.int32))
            gaps, seconds = run_streams(llm, args.batch, prompts, rng)
            p50, p90, p99 = (float(np.percentile(gaps, q)) * 1e3 for q in (50, 90, 99))
            rate = args.prompts * args.context / seconds
            if index:  # the first round is warm-up
                rounds.append({"p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "prompt_tokens_per_second": rate})
        least, best = limits.decode(args.batch, START) * 1e3, args.context / limits.prefill(args.context)
        shares = {
            name: table.row(work, [figures[name] for figures in rounds], limit, unit)
            for name, work, limit, unit in (
                ("p50_ms", "between tokens, p50", least, "ms"),
                ("p90_ms", "between tokens, p90", least, "ms"),
                ("p99_ms", "between tokens, p99", least, "ms"),
                ("prompt_tokens_per_second", "prompts with streams", best, "tok/s"),
            )
        }
        middle = {name: median([figures[name] for figures in rounds]) for name in rounds[0]}
        ratio = median([figures["p99_ms"] / figures["p50_ms"] for figures in rounds])
        print(f"  p99 is {ratio:.2f} times p50")
        limit = dict.fromkeys(("p50_ms", "p90_ms", "p99_ms"), least) | {"prompt_tokens_per_second": best}
        figures = {"rounds": rounds, "median": middle, "limit": limit, "share": shares, "ratio": ratio}
        return {**figures, **print_startup(llm)}


def main() -> None:
    parser = benchmark_parser(__doc__, default="qwen3-8b")
    parser.add_argument("--batch", "--streams", type=positive, default=32, help="number of streams")
    parser.add_argument("--context", "--prompt", type=positive, default=8192, help="tokens of each prompt")
    parser.add_argument(
        "--prompts", type=positive, default=8, help="number of prompts that arrive one after another"
    )
    parser.add_argument(
        "--max-step-milliseconds", type=number, default=25.0, help="target duration of steps with prefill"
    )
    parser.add_argument("--one-step", action="store_true", help="time single steps, without an engine")
    parser.add_argument(
        "--chunk-tokens",
        type=positive,
        nargs="+",
        default=[128, 512, 2048],
        help="tokens of the chunk of single steps",
    )
    parser.add_argument(
        "--chunk-start", type=natural, default=0, help="tokens of the prompt before the chunk of single steps"
    )
    own = {"max_step_milliseconds": "max_step_milliseconds"}
    args = parse_checked_args(parser, own, batch=4, context=256, prompts=2, chunk_tokens=[16, 64])
    run(args, mixed_step.measure if args.one_step else measure)


if __name__ == "__main__":
    main()
