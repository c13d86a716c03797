# SPDX-License-Identifier: Apache-2.0
"""Time of one layer's attention by backend, batch and context, with random KV on one GPU.

    python benchmarks/attention.py --shape qwen3-8b [--batch 1 8 32 256] [--context 1096] [--json]
    python benchmarks/attention.py --heads 16 --kv-heads 2 --head-dim 256 --window 4096 --page-size 64
    python benchmarks/attention.py --batch 8 64 101 --context 1000 --long 30000 --chunk

Decodes are measured from the raw QKV projection to the output of attention, as a layer runs them: query and
key norms, RoPE, storing the new token, attention. If the backend supports capture, they run in a captured
graph over several layers, which together have more KV than the GPU's caches hold. For prefill chunks
(`--chunk`, after `--prefix` cached tokens) only attention is measured, kernel by kernel. The limit of decodes
is the time to read the KV, and the limit of chunks is the time for their operations.

With `--long N`, the first row of each batch has a context of N tokens instead of `--context`. Then `split` is
also measured with length-aware splits, which captured graphs use for such batches (`split by lengths`).

The backend that `auto` selects is marked. The last lines name backends that were faster than the marked one.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from common_parts.arguments import Help, jsonable, natural, positive
from common_parts.engine_options import is_smoke_run, parse_args
from common_parts.gpu import require_device
from common_parts.layer_attention import Bench, Decodes, chunk_seconds
from common_parts.limits import add_roofline_options, measure_roofline, roofline_of
from common_parts.machine_info import machine
from common_parts.shapes import SHAPES, config_of
from common_parts.tables import Table

from mizzen.attention.base import Geometry, LengthSplitDecode
from mizzen.attention.registry import FACTORIES, select_backend
from mizzen.core.request import Int32
from mizzen.engine.config import ATTENTION_DECODE, ATTENTION_PREFILL
from mizzen.models.block import QKNorm

DECODES = {"cuda": ("split", "fa3", "flashinfer", "flashinfer-fa3"), "cpu": ("cpu", "reference")}
PROMPTS = {"cuda": ("fa3", "flashinfer", "flashinfer-fa3"), "cpu": ("cpu", "reference")}
BY_LENGTHS = " by lengths"
"""Suffix that is added to a backend's name if the backend uses length-aware splits."""
BETTER = 1.02
"""A backend is reported as faster than `auto` if the time of `auto` is more than this many times as long."""


def compare_backends(
    table: Table,
    names: tuple[str, ...],
    auto: str,
    limit: float,
    work: str,
    measure: Callable[[str], float],
) -> dict[str, Any]:
    """Measure each backend, print one row per backend, and return the figures in microseconds."""
    result: dict[str, Any] = {"limit_us": limit * 1e6, "auto": auto, "backends": {}}
    for name in names:
        try:
            took = measure(name)
        except (ValueError, ImportError) as error:
            print(f"  {work}, {name}: {error}")
            continue
        note = "auto" if name == auto else ""
        share = table.row(f"{work}, {name}", took * 1e6, limit * 1e6, "us", note)
        result["backends"][name] = {"us": took * 1e6, "share": share}
    return result


def slower_choices(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each measurement in which another backend is faster than the choice of `auto`."""
    for work, result in results.items():
        times = {name: figures["us"] for name, figures in result["backends"].items()}
        auto = result["auto"]
        fastest = min(times, key=lambda name: times[name], default=auto)
        if auto in times and times[auto] > BETTER * times[fastest]:
            yield f"{work}: {fastest} takes {times[fastest] / times[auto]:.0%} of the time of {auto} (auto)"


def lengths_of(args: argparse.Namespace, batch: int, context: int) -> Int32:
    """Return the context length of each row of a batch in tokens, int32 [batch]."""
    lengths = np.full(batch, context, np.int32)
    if args.long:
        lengths[0] = args.long
    return lengths


def decode_names(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the decode backends to measure."""
    names = tuple(args.decode or DECODES[args.device])
    return (*names, "split" + BY_LENGTHS) if args.long and "split" in names else names


def graph_variant(auto: str, bench: Bench, lengths: Int32) -> str:
    """Return `auto`, with the suffix for length-aware splits if captured graphs use them for these lengths.

    Args:
        auto: the backend that `auto` selects.
        bench: the KV to measure with.
        lengths: the context length of each row in tokens, int32 [batch]; graphs select splits by it.
    """
    backend = FACTORIES[auto](bench.geometry, bench.kv)
    supported = isinstance(backend, LengthSplitDecode) and backend.concurrent_splits
    return (
        auto + BY_LENGTHS if supported and backend.length_splits_are_faster(len(lengths), lengths) else auto
    )


def decode_limit(args: argparse.Namespace, geometry: Geometry, lengths: Int32) -> float:
    """Return the minimum seconds of a batch of decodes: the time to read its KV."""
    token_bytes = 2 * geometry.kv_heads * geometry.head_dim * (1 if args.kv_cache_dtype == "fp8" else 2)
    seen = np.minimum(lengths, geometry.windows[0] or math.inf)
    return float(seen.sum()) * token_bytes / roofline_of(args)[0]


def chunk_limit(args: argparse.Namespace, geometry: Geometry, count: int) -> float:
    """Return the minimum seconds for `count` tokens after the prefix: the time for their operations."""
    seen = geometry.windows[0] or math.inf
    pairs = sum(min(position + 1, seen) for position in range(args.prefix, args.prefix + count))
    return 4 * geometry.heads * geometry.head_dim * pairs / roofline_of(args)[1]


def measure(
    args: argparse.Namespace, geometry: Geometry, norm: bool, table: Table
) -> dict[str, dict[str, Any]]:
    """Measure decodes for each batch size and context length, then prefill chunks."""
    results: dict[str, dict[str, Any]] = {}
    for batch in args.batch:
        for context in args.context:
            lengths = lengths_of(args, batch, context)
            bench = Bench.make(args.device, args.kv_cache_dtype, args.page_size, geometry, lengths)
            least = decode_limit(args, geometry, lengths)
            auto = graph_variant(
                select_backend("auto", bench.geometry, bench.kv, decode=True), bench, lengths
            )

            def decode(name: str, bench: Bench = bench, lengths: Int32 = lengths) -> float:
                base = name.removesuffix(BY_LENGTHS)
                backend = FACTORIES[base](bench.geometry, bench.kv)
                return Decodes(bench, backend, lengths, norm, by_length=name != base).seconds(args.rounds)

            work = f"{args.long} and {batch - 1} x {context}" if args.long else f"{batch} x {context}"
            results[f"decode {work}"] = compare_backends(table, decode_names(args), auto, least, work, decode)
    for count in args.chunk:
        lengths = np.array([args.prefix + count], np.int32)
        bench = Bench.make(args.device, args.kv_cache_dtype, args.page_size, geometry, lengths)
        least = chunk_limit(args, geometry, count)
        auto = select_backend("auto", bench.geometry, bench.kv, decode=False)

        def prefill(name: str, bench: Bench = bench, count: int = count) -> float:
            backend = FACTORIES[name](bench.geometry, bench.kv)
            return chunk_seconds(bench, backend, count, args.prefix, args.rounds)

        work = f"chunk {args.prefix}+{count}"
        names = tuple(args.prefill or PROMPTS[args.device])
        results[work] = compare_backends(table, names, auto, least, work, prefill)
    return results


def geometry_of(args: argparse.Namespace) -> tuple[Geometry, bool]:
    """Return the command line's attention geometry, and whether the model has query and key norms."""
    config = config_of(args.shape)
    geometry = Geometry(
        heads=args.heads or config.heads,
        kv_heads=args.kv_heads or config.kv_heads,
        head_dim=args.head_dim or config.head_dim,
        windows=(args.window,),
    )
    return geometry, config.block.qk_norm is QKNorm.HEAD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="qwen3-8b", help="model whose layer is measured"
    )
    parser.add_argument("--heads", type=positive, help="query heads; by default those of the shape")
    parser.add_argument("--kv-heads", type=positive, help="KV heads; by default those of the shape")
    parser.add_argument("--head-dim", type=positive, help="size of a head; by default that of the shape")
    parser.add_argument(
        "--window", type=positive, help="sliding window in tokens, including the token itself"
    )
    parser.add_argument(
        "--batch",
        type=positive,
        nargs="*",
        default=[1, 8, 32, 64, 256],
        help="numbers of rows of decode batches",
    )
    parser.add_argument(
        "--context", type=positive, nargs="+", default=[1096], help="tokens in each row's context"
    )
    parser.add_argument(
        "--long", type=positive, help="context of each batch's first row; by default --context"
    )
    parser.add_argument(
        "--chunk", type=positive, nargs="*", default=[1024, 8192], help="numbers of tokens of prefill chunks"
    )
    parser.add_argument("--prefix", type=natural, default=0, help="cached tokens before the chunk")
    parser.add_argument(
        "--decode", nargs="+", choices=ATTENTION_DECODE[1:], help="backends to measure for decodes"
    )
    parser.add_argument(
        "--prefill", nargs="+", choices=ATTENTION_PREFILL[1:], help="backends to measure for prefill"
    )
    parser.add_argument("--page-size", type=positive, default=16, help="tokens in a KV page")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=("auto", "fp8"), help="precision of the KV cache"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu only checks that everything works"
    )
    parser.add_argument("--rounds", type=positive, default=5, help="number of rounds; the median counts")
    add_roofline_options(parser)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parse_args(parser, batch=[1, 4], context=[128], chunk=[64])
    require_device(args.device)
    measure_roofline(args)
    if is_smoke_run(args):
        torch.set_num_threads(1)  # more threads would only wait for each other
    geometry, norm = geometry_of(args)
    table = Table(
        f"{geometry.heads} heads over {geometry.kv_heads} of {geometry.head_dim}, page size {args.page_size}"
    )
    with torch.inference_mode():
        results = measure(args, geometry, norm, table)
    for line in slower_choices(results):
        print(f"  {line}")
    if args.json:
        header = {"options": vars(args), "machine": machine(args.device), "rows": table.rows}
        print(json.dumps(jsonable({**header, "attention": results})))


if __name__ == "__main__":
    main()
