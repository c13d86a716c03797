"""Time of prompts alone, with random weights on one GPU (B3).

    python benchmarks/prefill.py --shape qwen3-8b [--work 16x1024 4x4096 1x8192 1x32768] [--json]

Each piece of work is so many prompts of so many tokens, each continued by one token; the time runs from the
submission to the last one's token. No prompt is in the prefix cache. `--batch 1 4 --context 1024 8192` is
every pair of these. `--profile` runs each once more under PyTorch's profiler and tells by how much each
kernel delays its end.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch
from arguments import given, positive
from engine_choices import parsed
from step_parts import show, traced
from tables import Table
from torch.profiler import ProfilerActivity, profile

from gpu import drain, load, median, parser, run, started
from mizzen import LLM, SamplingParams
from mizzen.core.request import Request

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class Piece(NamedTuple):
    """So many prompts of so many tokens."""

    count: int
    length: int

    def __str__(self) -> str:
        return f"{self.count}x{self.length}"


DEFAULT = [Piece(16, 1024), Piece(4, 4096), Piece(1, 8192), Piece(1, 32768)]


def prefill(llm: LLM, count: int, length: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, min(llm.engine.info.vocab_size, 10000), (count, length)).astype(np.int32)
    begin = time.perf_counter()
    for rid, prompt in enumerate(prompts):
        llm.engine.submit(Request(rid=rid, prompt=prompt, sampling=ONE))
    drain(llm, f"{count}x{length}")
    return time.perf_counter() - begin


def piece(text: str) -> Piece:
    """Read `16x1024`: so many prompts of so many tokens."""
    count, _, size = text.partition("x")
    if not (count.isdigit() and size.isdigit() and int(count) and int(size)):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 16x1024, prompts by tokens")
    return Piece(int(count), int(size))


def measure(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Measure each piece of work."""
    results = {}
    with load(args, max_running_requests=64, cuda_graph_max_batch=1) as (llm, limits):
        for seed, work in enumerate(args.work):
            count, length = work
            prefill(llm, count, length, seed)  # lets the matrix products choose their kernels
            rounds = [prefill(llm, count, length, 1000 * (seed + 1) + i) for i in range(args.rounds)]
            took, least = median(rounds), limits.prefill(*[length] * count)
            rate, times = count * length / took, [seconds * 1e3 for seconds in rounds]
            share = table.row(str(work), times, least * 1e3, "ms", f"{rate:,.0f} tokens/s")
            found = {"ms": took * 1e3, "limit_ms": least * 1e3, "share": share, "tokens_per_second": rate}
            results[str(work)] = found
            if args.profile:
                with profile(activities=[ProfilerActivity.CUDA]) as trace:
                    prefill(llm, count, length, 1000 * (seed + 1) + args.rounds)
                    torch.cuda.synchronize()
                kernels = traced(trace.export_chrome_trace, 1)
                found["kernels"] = {name: asdict(part) for name, part in kernels.items()}
                show(kernels)
        return {"prefill": results, **started(llm)}


def main() -> None:
    made = parser(__doc__, default="qwen3-8b")
    made.add_argument("--work", type=piece, nargs="+", default=DEFAULT, help="prompts by tokens of each")
    made.add_argument("--batch", type=positive, nargs="+", help="prompts at once, in place of --work")
    made.add_argument("--context", type=positive, nargs="+", help="tokens of a prompt, in place of --work")
    made.add_argument("--profile", action="store_true", help="tell the time of each kernel")
    args = parsed(made, work=[Piece(4, 64), Piece(1, 512)])
    if args.profile and args.device != "cuda":
        made.error("--profile needs --device cuda")
    if args.batch or args.context:
        if "work" in given(made):
            made.error("--work says what --batch and --context say: leave one of them out")
        args.work = [Piece(count, size) for size in args.context or [1024] for count in args.batch or [1]]
    run(args, measure)


if __name__ == "__main__":
    main()
