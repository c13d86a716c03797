# SPDX-License-Identifier: Apache-2.0
"""Time of a decode step by batch size, with random weights on one GPU.

    python benchmarks/decode.py --shape qwen3-0.6b [--batch 1 8 32 128 256] [--context 1000] [--json]
    python benchmarks/decode.py --shape qwen3-0.6b --batch 256 --ask penalties

Prompts of `--context` tokens are prefilled first and stay in the prefix cache, so that all rows of a batch
start within a few steps. The result is the mean time of a step, from the step in which the last row reaches
its 32nd output token to the step in which the first row reaches its 160th. The limit is computed for the
context in the middle of that span: the prompt and 96 tokens. With `--long`, the first row of each batch has a
prompt of that length. `--profile` runs more steps under PyTorch's profiler, reports by how much each kernel
delays a step, and draws when the kernels of one layer run.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from common_parts.arguments import not_negative, positive
from common_parts.engine_options import engine_options, parse_checked_args
from common_parts.gpu import (
    benchmark_parser,
    check_ended,
    drain,
    fail,
    load,
    median,
    print_startup,
    run,
    token_bound,
)
from common_parts.kernel_delays import read_events
from common_parts.layer_timeline import report_trace
from common_parts.limits import Limits
from common_parts.tables import Table
from torch.profiler import ProfilerActivity, profile

from mizzen import LLM, SamplingParams
from mizzen.core.request import Request

FIRST, LAST = 32, 160
PROFILED = 20
CACHED = "rows of a batch start together only if their prompts are cached"

FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "bias": {"logit_bias": tuple((token, 1.0) for token in range(300))},
    "logprobs": {"logprobs": 5},
    "filters": {"top_k": 50, "top_p": 0.9},
    "top-p": {"top_p": 0.9},
    "filters-penalties": {"top_k": 20, "top_p": 0.8, "presence_penalty": 1.5},
}


def start(llm: LLM, prompts: list[np.ndarray], sampling: SamplingParams) -> None:
    """Submit one request per prompt."""
    for rid, prompt in enumerate(prompts):
        llm.engine.submit(Request(rid=rid, prompt=prompt, sampling=sampling, seed=rid))


def step(llm: LLM, rows: int) -> tuple[int, int] | None:
    """Run a step; return the lowest and highest output position, or None if it had fewer than `rows` rows."""
    output = llm.engine.step(0.0)
    llm.engine.drain_cache_events()
    if output is None or len(output.rids) < rows:
        return None
    return int(output.offsets.min()), int(output.offsets.max())


def explain_split_batch(llm: LLM, prompts: list[np.ndarray]) -> str:
    """Return an error message that says why the rows of a batch never decoded together, with advice."""
    batch, least = len(prompts), max(map(len, prompts)) + FIRST + 2
    if least > llm.engine.info.context_length:
        bound, more = token_bound(llm)
        problem = f"a prompt and {FIRST + 2} further tokens exceed {bound}: "
        return problem + ", or ".join(filter(None, ["lower --context or --long", more]))
    most = llm.options.max_running_requests
    if most < batch:
        return f"max_running_requests is {most}: raise it for a batch of {batch}"
    capacity = llm.engine.info.pages_total * llm.engine.info.page_size
    return (
        f"the KV cache of {capacity} tokens has no room for a batch of {batch}: lower --batch or "
        "--context, or raise --engine kv_cache_tokens"
    )


def step_seconds(llm: LLM, prompts: list[np.ndarray], sampling: SamplingParams) -> float:
    """Run a batch; return the mean seconds of a step while all its rows decode.

    Raises:
        SystemExit: a prompt was rejected, or the rows never decoded together.
    """
    start(llm, prompts, sampling)
    times: list[float] = []
    while llm.engine.busy:
        reached = step(llm, len(prompts))
        if reached is not None and reached[0] >= FIRST and reached[1] <= LAST:
            times.append(time.perf_counter())
    check_ended(llm, f"batch {len(prompts)}")
    if len(times) < 2:
        fail(explain_split_batch(llm, prompts))
    return (times[-1] - times[0]) / (len(times) - 1)


def profile_step(llm: LLM, prompts: list[np.ndarray], sampling: SamplingParams) -> list[dict[str, Any]]:
    """Profile some steps; return the events of the trace."""
    start(llm, prompts, sampling)
    while llm.engine.busy and (step(llm, len(prompts)) or (0, 0))[0] < FIRST:
        pass
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(PROFILED):
            step(llm, len(prompts))
        torch.cuda.synchronize()
    drain(llm, f"batch {len(prompts)}")
    return read_events(trace.export_chrome_trace)


def cache_prompts(
    llm: LLM, limits: Limits, count: int, context: int, long: int | None = None
) -> list[np.ndarray]:
    """Make `count` random prompts of `context` tokens, the first one of `long` tokens, and cache them."""
    rng, highest = np.random.default_rng(0), min(limits.config.vocab_size, 10000)
    prompts = list(rng.integers(0, highest, (count, context)).astype(np.int32))
    if long:
        prompts[0] = rng.integers(0, highest, long).astype(np.int32)
    once = SamplingParams(max_tokens=1, ignore_eos=True)
    for rid, prompt in enumerate(prompts):
        llm.engine.submit(Request(rid=rid, prompt=prompt, sampling=once))
    drain(llm, f"prompts of {context} tokens")
    return prompts


def report_kernels(
    llm: LLM, limits: Limits, prompts: list[np.ndarray], sampling: SamplingParams
) -> dict[str, dict[str, float]]:
    """Profile steps of cached prompts, print the times of kernels and a timeline, and return the times."""
    events = profile_step(llm, prompts, sampling)
    return report_trace(events, limits.config.layers, PROFILED)


def measure_steps(
    llm: LLM,
    limits: Limits,
    table: Table,
    *,
    batches: Sequence[int],
    context: int,
    rounds: int,
    sampling: SamplingParams,
    long: int | None = None,
    profiled: bool = False,
) -> dict[int, dict[str, Any]]:
    """Measure the decode step of each batch size; return the figures by batch size.

    Args:
        llm: the engine; at least the largest batch can run at once.
        limits: its limits.
        table: the table that gets the rows.
        batches: numbers of rows that decode together.
        context: tokens of a prompt.
        rounds: number of rounds, whose median counts.
        sampling: sampling parameters of all requests, with `LAST` + 2 tokens.
        long: tokens of the prompt of the first row; by default `context`.
        profiled: whether to report the times of kernels.
    """
    results: dict[int, dict[str, Any]] = {}
    prompts = cache_prompts(llm, limits, max(batches), context, long)
    for batch in batches:
        times = [step_seconds(llm, prompts[:batch], sampling) for _ in range(rounds)]
        middle = sum(map(len, prompts[:batch])) / batch + (FIRST + LAST) / 2
        took, least = median(times), limits.decode(batch, middle)
        with_sums = least + limits.collectives(batch, batch)
        shown = limits.gpus > 1 and not math.isnan(with_sums)
        note = f"{with_sums * 1e3:.2f} with collectives: {with_sums / took:.0%}" if shown else ""
        steps = [seconds * 1e3 for seconds in times]
        share = table.row(f"decode step, batch {batch}", steps, least * 1e3, "ms", note)
        results[batch] = {"ms": took * 1e3, "limit_ms": least * 1e3, "share": share}
        results[batch] |= {"limit_with_collectives_ms": with_sums * 1e3}
        if profiled:
            results[batch]["kernels"] = report_kernels(llm, limits, prompts[:batch], sampling)
    return results


def make_sampling(temperature: float, feature: str = "nothing") -> SamplingParams:
    """Return the sampling parameters of a batch that uses one of `FEATURES`."""
    return SamplingParams(temperature=temperature, max_tokens=LAST + 2, ignore_eos=True, **FEATURES[feature])


def measure(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Measure the decode step of each batch size."""
    largest = max(args.batch)
    with load(args, max_running_requests=largest, cuda_graph_max_batch=largest) as (llm, limits):
        steps = measure_steps(
            llm,
            limits,
            table,
            batches=args.batch,
            context=args.context,
            rounds=args.rounds,
            sampling=make_sampling(args.temperature, args.ask),
            long=args.long,
            profiled=args.profile,
        )
        return {"steps": steps, **print_startup(llm)}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--batch",
        type=positive,
        nargs="+",
        default=[1, 8, 32, 128, 256],
        help="numbers of rows that decode together",
    )
    parser.add_argument("--context", type=positive, default=1000, help="tokens of a prompt")
    parser.add_argument("--long", type=positive, help="prompt tokens of the first row; by default --context")
    parser.add_argument("--temperature", type=not_negative, default=0.6, help="0 is greedy")
    parser.add_argument(
        "--ask", choices=tuple(FEATURES), default="nothing", help="sampling features that each request uses"
    )
    parser.add_argument("--profile", action="store_true", help="report by how much each kernel delays a step")
    args = parse_checked_args(parser, batch=[1, 4], context=64)
    if args.profile and args.device != "cuda":
        parser.error("--profile needs --device cuda")
    if engine_options(args)["prefix_cache"] == "none":
        parser.error(CACHED)
    run(args, measure, without={"prefix cache off": CACHED})


if __name__ == "__main__":
    main()
