# SPDX-License-Identifier: Apache-2.0
"""Rate of embeddings, compared with that of prefill in the same run, with random weights on one GPU.

    python benchmarks/pooling/embed.py --shape qwen3-8b [--work 256x512 2048x50] [--json]
    python benchmarks/pooling/embed.py --shape bert-large [--work 1024x512]

A workload COUNTxLENGTH consists of COUNT prompts of LENGTH tokens, which one call of `LLM.embed` gets. The
time runs from the call to its return, and no prompt is in the prefix cache. A model that generates is also
measured with `--prefill` as in `prefill.py`; runs alternate, and rates are compared with that one. The limit
is the time for the operations, so the share of it is the share of the measured bfloat16 rate. `--profile`
runs each workload once more under PyTorch's profiler, and reports by how much each kernel delays its end.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from common_parts.engine_options import engine_options, parse_checked_args
from common_parts.gpu import benchmark_parser, loaded, print_startup, run
from common_parts.kernel_delays import KernelTimes, print_kernels, trace_kernels
from common_parts.limits import limits_of
from common_parts.shapes import ENCODER_SHAPES, SHAPES, shape_folder
from common_parts.tables import Table
from prefill import Prompts, parse_prompts, prefill
from torch.profiler import ProfilerActivity, profile

from mizzen import LLM
from mizzen.models.registry import read_config

DEFAULT = [Prompts(256, 512), Prompts(2048, 50)]


def embed(llm: LLM, work: Prompts, seed: int) -> float:
    """Embed random prompts; return the seconds."""
    rng = np.random.default_rng(seed)
    highest = min(llm.engine.info.vocab_size, 10000)
    prompts = rng.integers(0, highest, (work.count, work.length)).tolist()
    begin = time.perf_counter()
    llm.embed(prompts, progress=False)
    return time.perf_counter() - begin


def trace(llm: LLM, work: Prompts, seed: int) -> dict[str, KernelTimes]:
    """Return the times of the kernels of a workload."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        embed(llm, work, seed)
        torch.cuda.synchronize()
    return trace_kernels(profiler.export_chrome_trace, 1)


def measure_rates(llm: LLM, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the tokens per second of each round, by workload; the key of prefill is "prefill"."""
    rates: dict[str, list[float]] = {}
    for seed in range(args.rounds + 1):
        if llm.engine.info.generates:
            seconds = prefill(llm, args.prefill.count, args.prefill.length, 1000 + seed)
            rates.setdefault("prefill", []).append(args.prefill.count * args.prefill.length / seconds)
        for work in args.work:
            rates.setdefault(str(work), []).append(work.count * work.length / embed(llm, work, seed))
    # In the first round, GEMMs select their kernels.
    return {name: rounds[1:] for name, rounds in rates.items()}


def measure(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Measure prefill and each workload."""
    options = engine_options(args, load_format="dummy")
    with shape_folder(args.shape) as folder, loaded(args.device, folder, options) as llm:
        limits = limits_of(args, read_config(folder), options)
        rates = measure_rates(llm, args)
        works = {"prefill": args.prefill} | {str(work): work for work in args.work}
        prefill_rate = statistics.median(rates["prefill"]) if "prefill" in rates else None
        figures: dict[str, Any] = {}
        for name, rounds in rates.items():
            work = works[name]
            limit = work.count * work.length / limits.prefill(*[work.length] * work.count)
            ratio = None if prefill_rate is None else statistics.median(rounds) / prefill_rate
            is_prefill = name == "prefill"
            note = "" if ratio is None or is_prefill else f"{ratio:.1%} of prefill"
            label = f"prefill {work}" if is_prefill else f"embed {work}"
            share = table.row(label, rounds, limit, "tok/s", note)
            figures[name] = {"tokens_per_second": statistics.median(rounds), "share": share, "ratio": ratio}
            if args.profile and not is_prefill:
                kernels = trace(llm, work, args.rounds + 1)
                figures[name]["kernels"] = {key: asdict(part) for key, part in kernels.items()}
                print_kernels(kernels)
        return {"embed": figures, **print_startup(llm)}


def main() -> None:
    parser = benchmark_parser(__doc__, default="qwen3-8b", shapes=SHAPES | ENCODER_SHAPES)
    parser.add_argument(
        "--work", type=parse_prompts, nargs="+", default=DEFAULT, help="workloads COUNTxLENGTH"
    )
    parser.add_argument(
        "--prefill", type=parse_prompts, default=Prompts(16, 1024), help="workload of prefill COUNTxLENGTH"
    )
    parser.add_argument(
        "--profile", action="store_true", help="report by how much each kernel delays a workload"
    )
    args = parse_checked_args(parser, work=[Prompts(4, 64), Prompts(8, 5)], prefill=Prompts(2, 128))
    if args.profile and args.device != "cuda":
        parser.error("--profile needs --device cuda")
    run(args, measure)


if __name__ == "__main__":
    main()
