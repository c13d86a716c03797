# SPDX-License-Identifier: Apache-2.0
"""Time of an all-reduce over the GPUs of this machine, alone and fused with a norm, by size and method.

    python benchmarks/allreduce.py --ranks 2 [--json]

Starts one process per GPU. For each size, one captured graph contains many all-reduces. The time of one
all-reduce is the graph's time divided by the number of all-reduces in it. Each rank computes the median of
its rounds, and the result is the median of the slowest rank. The limit is the time in which a GPU can receive
the minimum number of bytes, at the given bandwidth of its links in one direction. The minimum number of bytes
is 2 * (ranks - 1) / ranks times the size of the message.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from common_parts.arguments import Help, above_zero, positive
from common_parts.machine_info import machine

from mizzen.parallel.cuda_collectives import KIB, CudaCollectives
from mizzen.parallel.process_group import RankConfig, RankGroup

SIZES = [KIB << power for power in range(3, 17)]
REPEATS = 40
COLUMNS = (1024, 4096, 5120)
FUSED = ("push", "fused", "fused-two-shot")
ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
Times = dict[str, dict[str, float]]
"""Microseconds by message size or shape, then by method."""


def graph_of(work: Callable[[], object], repeats: int) -> torch.cuda.CUDAGraph:
    """Capture `repeats` calls of an operation in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # calls that overlap would be timed as one
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(repeats):
                work()
    torch.cuda.synchronize()
    return graph


def microseconds(group: RankGroup, work: Callable[[], object], rounds: int) -> float:
    """Return the microseconds per call of `work`: the median over the rounds, on the slowest rank."""
    graph = graph_of(work, REPEATS)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(rounds + 2):
        group.collectives.all_reduce(torch.zeros(8, device="cuda"))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / REPEATS)
    mine = statistics.median(times[2:])
    return max(float(word) for word in group.exchange("time", str(mine)))


def collectives_of(group: RankGroup, method: str) -> CudaCollectives:
    """Return new collectives for the group, in which every all-reduce uses the given method."""
    existing = group.collectives
    if not isinstance(existing, CudaCollectives):
        raise TypeError("the ranks have no GPUs")
    return CudaCollectives(existing.group, group.config.device, method)


def log_progress(group: RankGroup, work: str) -> None:
    """Log what is measured next: if that measurement hangs, the last line on standard error names it."""
    if not group.rank:
        print(f"{time.perf_counter():.1f} s: measuring {work}", file=sys.stderr, flush=True)


def sweep(group: RankGroup, rounds: int) -> Times:
    """Measure the all-reduce by every method at every size; return the times in microseconds."""
    results: Times = {}
    device = group.config.device
    for method in ("nccl", "one-shot", "two-shot"):
        collectives = collectives_of(group, method)
        for size in SIZES:
            x = torch.ones(size // 2, dtype=torch.bfloat16, device=device).view(-1, 512)
            if method != "nccl" and not collectives.uses_peer_memory(x):
                continue
            log_progress(group, f"{method}, {size // KIB} KiB")
            took = microseconds(group, lambda c=collectives, x=x: c.all_reduce(x), rounds)
            results.setdefault(str(size), {})[method] = took
    return results


def fused(group: RankGroup, rounds: int) -> Times:
    """Measure all-reduce, residual addition and norm, as one kernel and as two; return the microseconds."""
    from mizzen.kernels.norm import add_rms_norm

    results: Times = {}
    device = group.config.device
    fusing = {method: collectives_of(group, method) for method in FUSED}
    plain = {method: collectives_of(group, method) for method in ("one-shot", "two-shot")}
    for columns in COLUMNS:
        weight = torch.ones(columns, dtype=torch.bfloat16, device=device)
        for rows in ROWS:
            x = torch.randn(rows, columns, dtype=torch.bfloat16, device=device)
            residual = torch.randn_like(x)
            mine: dict[str, float] = {}
            log_progress(group, f"all-reduce and norm of {rows} x {columns}")
            for method, one in fusing.items():
                if one.all_reduce_add_norm(x, residual, weight, 1e-6) is not None:
                    mine[method] = microseconds(
                        group,
                        lambda c=one, r=residual, x=x, w=weight: c.all_reduce_add_norm(x, r, w, 1e-6),
                        rounds,
                    )
            for method, two in plain.items():
                if two.uses_peer_memory(x):
                    mine[f"{method}, then norm"] = microseconds(
                        group,
                        lambda c=two, r=residual, x=x, w=weight: add_rms_norm(c.all_reduce(x), r, w, 1e-6),
                        rounds,
                    )
            results[f"{rows} x {columns}"] = mine
    return results


def check(group: RankGroup) -> None:
    """Check the fused kernels against PyTorch operations, so that no incorrect kernel is measured."""
    device = group.config.device
    for method, columns in itertools.product(FUSED, COLUMNS):
        collectives = collectives_of(group, method)
        for rows in ROWS:
            generator = torch.Generator(device).manual_seed(group.rank * 1000 + rows)
            x = torch.randn(rows, columns, device=device, generator=generator).to(torch.bfloat16)
            residual = torch.ones(rows, columns, dtype=torch.bfloat16, device=device)
            weight = torch.full((columns,), 0.5, dtype=torch.bfloat16, device=device)
            total = x.float()
            torch.distributed.all_reduce(total)
            stream = (total + residual.float()).to(torch.bfloat16)
            expected = F.rms_norm(stream.float(), (columns,), weight.float(), 1e-6)
            normed = collectives.all_reduce_add_norm(x, residual, weight, 1e-6)
            log_progress(group, f"nothing yet: checked {method}, {rows} x {columns}")
            if normed is None:
                continue
            torch.testing.assert_close(residual, stream, atol=0.02, rtol=0.02)
            torch.testing.assert_close(normed.float(), expected, atol=0.02, rtol=0.02)


def run_rank(args: argparse.Namespace) -> None:
    """Run the measurements on one rank; rank 0 prints the results."""
    place = RankConfig(
        rank=args.rank,
        size=args.ranks,
        rendezvous=args.rendezvous,
        device=torch.device("cuda", args.rank),
        all_reduce="nccl",
    )
    group = RankGroup(place)
    with torch.inference_mode():
        check(group)
        sums = sweep(group, args.rounds) if args.part in ("all", "sums") else {}
        with_norm = fused(group, args.rounds) if args.part in ("all", "norm") else {}
    if args.rank == 0:
        print_results(args, sums, with_norm)
    group.barrier("end")
    sys.stdout.flush()
    os._exit(0)  # captured graphs hold collectives, so an orderly teardown is not possible


def print_results(args: argparse.Namespace, sums: Times, with_norm: Times) -> None:
    """Print the times by size and by shape, and with `--json` also as one JSON object."""
    for size, row in sums.items():
        least = 2 * (args.ranks - 1) / args.ranks * int(size) / (args.bandwidth * 1e3)
        best = min(row, key=lambda method: row[method])
        times = ", ".join(f"{method} {took:.1f}" for method, took in row.items())
        print(f"{int(size) // KIB:>6} KiB: {times} us; {best}, limit {least:.1f}: {least / row[best]:.0%}")
    for shape, row in with_norm.items():
        times = ", ".join(f"{method} {took:.1f}" for method, took in row.items())
        print(f"{shape:>12} with norm: {times} us")
    if args.json:
        header = {"ranks": args.ranks, "machine": machine("cuda")}
        print(json.dumps({**header, "all_reduce": sums, "with_norm": with_norm}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--ranks", type=positive, default=2, help="GPUs in the all-reduce")
    parser.add_argument("--rounds", type=positive, default=9, help="number of rounds; the median counts")
    parser.add_argument(
        "--part", choices=("all", "sums", "norm", "check"), default="all", help="measure only this part"
    )
    parser.add_argument(
        "--bandwidth", type=above_zero, default=450.0, help="GB/s of a GPU's links in one direction"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args)
        return
    if args.ranks > (here := torch.cuda.device_count()):
        parser.error(f"--ranks {args.ranks} needs {args.ranks} GPUs, but this machine has {here}")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--rendezvous", f"file://{Path(folder)}/meet"]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(args.ranks)]
        try:
            while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
                time.sleep(0.1)
            codes = [rank.poll() or 0 for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    sys.exit(max(abs(code) for code in codes))


if __name__ == "__main__":
    main()
