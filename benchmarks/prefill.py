# SPDX-License-Identifier: Apache-2.0
"""Time of prefill without decoding, with random weights on one GPU.

    python benchmarks/prefill.py --shape qwen3-8b [--work 16x1024 4x4096 1x8192 1x32768] [--json]

A workload COUNTxLENGTH consists of COUNT prompts of LENGTH tokens; one token is generated for each prompt.
The time runs from the submission of the prompts to the last prompt's token. No prompt is in the prefix cache.
`--batch 1 4 --context 1024 8192` measures all combinations of these numbers. `--profile` runs each workload
once more under PyTorch's profiler, reports by how much each kernel delays the end of the workload, and draws
when the kernels of one layer run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from common_parts.arguments import given_options, positive
from common_parts.engine_options import parse_checked_args
from common_parts.gpu import benchmark_parser, drain, load, median, print_startup, run
from common_parts.kernel_delays import read_events
from common_parts.layer_timeline import report_trace
from common_parts.limits import Limits
from common_parts.tables import Table
from torch.profiler import ProfilerActivity, profile

from mizzen import LLM, SamplingParams
from mizzen.core.request import Request

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class Prompts(NamedTuple):
    """A workload of `count` prompts of `length` tokens."""

    count: int
    length: int

    def __str__(self) -> str:
        return f"{self.count}x{self.length}"


DEFAULT = [Prompts(16, 1024), Prompts(4, 4096), Prompts(1, 8192), Prompts(1, 32768)]


def prefill(llm: LLM, count: int, length: int, seed: int) -> float:
    """Run `count` random prompts of `length` tokens; return the seconds until the last prompt's token."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, min(llm.engine.info.vocab_size, 10000), (count, length)).astype(np.int32)
    begin = time.perf_counter()
    for rid, prompt in enumerate(prompts):
        llm.engine.submit(Request(rid=rid, prompt=prompt, sampling=ONE))
    drain(llm, f"{count}x{length}")
    return time.perf_counter() - begin


def parse_prompts(text: str) -> Prompts:
    """Parse a workload such as `16x1024`: number of prompts, then tokens per prompt.

    Raises:
        argparse.ArgumentTypeError: the text does not have this form.
    """
    count, _, size = text.partition("x")
    if not (count.isdigit() and size.isdigit() and int(count) and int(size)):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 16x1024, prompts by tokens")
    return Prompts(int(count), int(size))


def report_kernels(llm: LLM, limits: Limits, work: Prompts, seed: int) -> dict[str, dict[str, float]]:
    """Profile a workload, print the times of kernels and a timeline, and return the times."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        prefill(llm, work.count, work.length, seed)
        torch.cuda.synchronize()
    return report_trace(read_events(trace.export_chrome_trace), limits.config.layers, 1)


def measure_prompts(
    llm: LLM, limits: Limits, table: Table, *, works: Sequence[Prompts], rounds: int, profiled: bool = False
) -> dict[str, dict[str, Any]]:
    """Measure each workload; return the figures by workload.

    Args:
        llm: the engine.
        limits: its limits.
        table: the table that gets the rows.
        works: the workloads.
        rounds: number of rounds, whose median counts.
        profiled: whether to report the times of kernels.
    """
    results: dict[str, dict[str, Any]] = {}
    for seed, work in enumerate(works):
        count, length = work
        prefill(llm, count, length, seed)  # lets the GEMMs select their kernels
        seconds = [prefill(llm, count, length, 1000 * (seed + 1) + i) for i in range(rounds)]
        took, least = median(seconds), limits.prefill(*[length] * count)
        rate, times = count * length / took, [each * 1e3 for each in seconds]
        share = table.row(str(work), times, least * 1e3, "ms", f"{rate:,.0f} tokens/s")
        figures = {"ms": took * 1e3, "limit_ms": least * 1e3, "share": share, "tokens_per_second": rate}
        results[str(work)] = figures
        if profiled:
            figures["kernels"] = report_kernels(llm, limits, work, 1000 * (seed + 1) + rounds)
    return results


def measure(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Measure each workload."""
    with load(args, max_running_requests=64, cuda_graph_max_batch=1) as (llm, limits):
        figures = measure_prompts(
            llm, limits, table, works=args.work, rounds=args.rounds, profiled=args.profile
        )
        return {"prefill": figures, **print_startup(llm)}


def main() -> None:
    parser = benchmark_parser(__doc__, default="qwen3-8b")
    parser.add_argument(
        "--work", type=parse_prompts, nargs="+", default=DEFAULT, help="workloads COUNTxLENGTH"
    )
    parser.add_argument("--batch", type=positive, nargs="+", help="numbers of prompts, instead of --work")
    parser.add_argument("--context", type=positive, nargs="+", help="tokens per prompt, instead of --work")
    parser.add_argument(
        "--profile", action="store_true", help="report by how much each kernel delays a workload"
    )
    args = parse_checked_args(parser, work=[Prompts(4, 64), Prompts(1, 512)])
    if args.profile and args.device != "cuda":
        parser.error("--profile needs --device cuda")
    if args.batch or args.context:
        if "work" in given_options(parser):
            parser.error("--work conflicts with --batch and --context: leave one of them out")
        args.work = [Prompts(count, size) for size in args.context or [1024] for count in args.batch or [1]]
    run(args, measure)


if __name__ == "__main__":
    main()
