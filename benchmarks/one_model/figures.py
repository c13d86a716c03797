# SPDX-License-Identifier: Apache-2.0
"""The main figures of one model from one engine: prompts, decode steps and offline throughput.

    python benchmarks/one_model/figures.py --shape qwen3-8b [--parts prefill decode offline] [--json]

The figures are those of `prefill.py`, `decode.py` and `offline.py`. Here all of them come from one engine
with its default graphs, so that large models are loaded once. `--profile` then reports the times of kernels,
after all figures are measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import decode
import offline
import prefill
from common_parts.arguments import positive
from common_parts.engine_options import parse_checked_args
from common_parts.gpu import benchmark_parser, load, print_startup, run
from common_parts.limits import Limits
from common_parts.tables import Table
from decode import CACHED, cache_prompts, make_sampling, measure_steps
from prefill import Prompts, measure_prompts, parse_prompts

from mizzen import LLM

PARTS = ("prefill", "decode", "offline")
NEW_SEED = 1_000_000
"""Seed of profiled prompts, whose beginnings are not cached: no other prompt has it."""


def report(llm: LLM, limits: Limits, args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Profile prompts and decode steps, print the times of kernels, and add them to the figures."""
    if "prefill" in figures:
        for work in args.work:
            print(f"prompts {work}:")
            kernels = prefill.report_kernels(llm, limits, work, NEW_SEED)
            figures["prefill"][str(work)]["kernels"] = kernels
    if "decode" in figures:
        prompts = cache_prompts(llm, limits, max(args.batch), args.context)
        for batch in args.batch:
            print(f"decode step, batch {batch}:")
            kernels = decode.report_kernels(llm, limits, prompts[:batch], make_sampling(0.6))
            figures["decode"][batch]["kernels"] = kernels


def measure(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Measure the parts of `--parts`."""
    requests = argparse.Namespace(batch=args.requests, context=None, output=None)
    prompts, outputs = offline.lengths(requests)
    running = max(*args.batch, len(prompts))
    figures: dict[str, Any] = {}
    with load(args, max_running_requests=running) as (llm, limits):
        if "prefill" in args.parts:
            figures["prefill"] = measure_prompts(llm, limits, table, works=args.work, rounds=args.rounds)
        if "decode" in args.parts:
            figures["decode"] = measure_steps(
                llm,
                limits,
                table,
                batches=args.batch,
                context=args.context,
                rounds=args.rounds,
                sampling=make_sampling(0.6),
            )
        if "offline" in args.parts:
            figures["offline"] = offline.measure_rounds(
                llm,
                limits,
                table,
                prompts=prompts,
                outputs=outputs,
                running=len(prompts),
                rounds=args.rounds,
            )
        if args.profile:
            report(llm, limits, args, figures)
        return figures | print_startup(llm)


def main() -> None:
    parser = benchmark_parser(__doc__, default="qwen3-8b")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument(
        "--batch",
        type=positive,
        nargs="+",
        default=[1, 8, 32, 128, 256],
        help="numbers of rows that decode together",
    )
    parser.add_argument("--context", type=positive, default=1096, help="tokens of a prompt of a decode")
    parser.add_argument(
        "--work", type=parse_prompts, nargs="+", default=[Prompts(1, 8192)], help="workloads COUNTxLENGTH"
    )
    parser.add_argument(
        "--requests", type=positive, default=offline.SEQUENCES, help="number of offline requests"
    )
    parser.add_argument(
        "--profile", action="store_true", help="report the times of kernels of prompts and decode steps"
    )
    args = parse_checked_args(parser, batch=[1, 4], context=64, work=[Prompts(4, 64)], requests=4)
    if args.profile and args.device != "cuda":
        parser.error("--profile needs --device cuda")
    run(args, measure, without={"prefix cache off": CACHED})


if __name__ == "__main__":
    main()
