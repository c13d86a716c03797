"""Time of one layer's attention by backend, batch and context, with random KV on one GPU.

    python benchmarks/attention.py --shape qwen3-8b [--batch 1 8 32 256] [--context 1096] [--json]
    python benchmarks/attention.py --heads 16 --kv-heads 2 --head-dim 256 --window 4096 --page-size 64
    python benchmarks/attention.py --batch 8 64 101 --context 1000 --long 30000 --chunk

Decodes are measured from the projection to the attended values, as a layer runs them: norms of queries and
keys, rotation, storing the new token, attention. They run in a captured graph over several layers where the
backend can be captured, with more KV than the GPU's caches hold. Chunks of prompts (`--chunk`, behind
`--prefix` cached tokens) are attention alone, launched one by one. The limits are the bytes of the KV and the
operations.

With `--long` the first row of each batch has another context than the others, and `split` is also measured as
graphs run it that cut contexts by their lengths (`split by lengths`).

What `auto` takes is marked; where another backend is faster, the last lines say so.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from arguments import Help, natural, plain, positive
from engine_choices import read, smoke
from layer_attention import Bench, Decodes, chunk_seconds
from limits import add_roof, roof_of
from ran_on import machine
from shapes import SHAPES, config_of
from tables import Table

from gpu import need_device
from mizzen.attention.base import Geometry, UnevenDecode
from mizzen.attention.registry import FACTORIES, choose
from mizzen.core.request import Int32
from mizzen.engine.config import ATTENTION_DECODE, ATTENTION_PREFILL

DECODES = {"cuda": ("split", "fa3", "flashinfer", "flashinfer-fa3"), "cpu": ("cpu", "reference")}
PROMPTS = {"cuda": ("fa3", "flashinfer", "flashinfer-fa3"), "cpu": ("cpu", "reference")}
BY_LENGTHS = " by lengths"
"""Behind the name of a backend: contexts are cut so."""
BETTER = 1.02
"""Another backend is named where `auto`'s takes so many times as long."""


def compared(
    table: Table,
    names: tuple[str, ...],
    auto: str,
    limit: float,
    work: str,
    measure: Callable[[str], float],
) -> dict[str, Any]:
    """Measure each backend, print a row each, and return the figures in microseconds."""
    found: dict[str, Any] = {"limit_us": limit * 1e6, "auto": auto, "backends": {}}
    for name in names:
        try:
            took = measure(name)
        except (ValueError, ImportError) as error:
            print(f"  {work}, {name}: {error}")
            continue
        note = "auto" if name == auto else ""
        share = table.row(f"{work}, {name}", took * 1e6, limit * 1e6, "us", note)
        found["backends"][name] = {"us": took * 1e6, "share": share}
    return found


def slower_choices(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Say where another backend than `auto`'s is the fastest."""
    for work, result in found.items():
        times = {name: figures["us"] for name, figures in result["backends"].items()}
        auto = result["auto"]
        fastest = min(times, key=lambda name: times[name], default=auto)
        if auto in times and times[auto] > BETTER * times[fastest]:
            yield f"{work}: {fastest} takes {times[fastest] / times[auto]:.0%} of the time of {auto} (auto)"


def lengths_of(args: argparse.Namespace, batch: int, context: int) -> Int32:
    """Return the tokens of each row of a batch."""
    lengths = np.full(batch, context, np.int32)
    if args.long:
        lengths[0] = args.long
    return lengths


def decode_names(args: argparse.Namespace) -> tuple[str, ...]:
    """Return what decodes are measured by."""
    names = tuple(args.decode or DECODES[args.device])
    return (*names, "split" + BY_LENGTHS) if args.long and "split" in names else names


def taken(auto: str, bench: Bench, lengths: Int32) -> str:
    """Return by what graphs run a batch, where `auto` takes a backend."""
    backend = FACTORIES[auto](bench.geometry, bench.kv)
    able = isinstance(backend, UnevenDecode) and backend.uneven_slots
    return auto + BY_LENGTHS if able and backend.uneven(len(lengths), lengths) else auto


def decode_limit(args: argparse.Namespace, geometry: Geometry, lengths: Int32) -> float:
    """Return the seconds of reading the KV that a batch of decodes sees."""
    token_bytes = 2 * geometry.kv_heads * geometry.head_dim * (1 if args.kv_cache_dtype == "fp8" else 2)
    seen = np.minimum(lengths, geometry.windows[0] or math.inf)
    return float(seen.sum()) * token_bytes / roof_of(args)[0]


def chunk_limit(args: argparse.Namespace, geometry: Geometry, count: int) -> float:
    """Return the seconds of the operations of a chunk behind the prefix."""
    seen = geometry.windows[0] or math.inf
    pairs = sum(min(position + 1, seen) for position in range(args.prefix, args.prefix + count))
    return 4 * geometry.heads * geometry.head_dim * pairs / roof_of(args)[1]


def measure(
    args: argparse.Namespace, geometry: Geometry, norm: bool, table: Table
) -> dict[str, dict[str, Any]]:
    """Measure decodes by batch and context, then chunks."""
    found: dict[str, dict[str, Any]] = {}
    for batch in args.batch:
        for context in args.context:
            lengths = lengths_of(args, batch, context)
            bench = Bench.make(args.device, args.kv_cache_dtype, args.page_size, geometry, lengths)
            least = decode_limit(args, geometry, lengths)
            auto = taken(choose("auto", bench.geometry, bench.kv, decode=True), bench, lengths)

            def decode(name: str, bench: Bench = bench, lengths: Int32 = lengths) -> float:
                plain = name.removesuffix(BY_LENGTHS)
                backend = FACTORIES[plain](bench.geometry, bench.kv)
                return Decodes(bench, backend, lengths, norm, uneven=name != plain).seconds(args.rounds)

            work = f"{args.long} and {batch - 1} x {context}" if args.long else f"{batch} x {context}"
            found[f"decode {work}"] = compared(table, decode_names(args), auto, least, work, decode)
    for count in args.chunk:
        lengths = np.array([args.prefix + count], np.int32)
        bench = Bench.make(args.device, args.kv_cache_dtype, args.page_size, geometry, lengths)
        least = chunk_limit(args, geometry, count)
        auto = choose("auto", bench.geometry, bench.kv, decode=False)

        def prefill(name: str, bench: Bench = bench, count: int = count) -> float:
            backend = FACTORIES[name](bench.geometry, bench.kv)
            return chunk_seconds(bench, backend, count, args.prefix, args.rounds)

        work = f"chunk {args.prefix}+{count}"
        names = tuple(args.prefill or PROMPTS[args.device])
        found[work] = compared(table, names, auto, least, work, prefill)
    return found


def geometry_of(args: argparse.Namespace) -> tuple[Geometry, bool]:
    """Return the attention of the shape, changed as asked, and whether queries and keys have norms."""
    config = config_of(args.shape)
    geometry = Geometry(
        heads=args.heads or config.heads,
        kv_heads=args.kv_heads or config.kv_heads,
        head_dim=args.head_dim or config.head_dim,
        windows=(args.window,),
    )
    return geometry, config.qk_norm


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    made.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b", help="whose layer is measured")
    made.add_argument("--heads", type=positive, help="query heads, if not the shape's")
    made.add_argument("--kv-heads", type=positive, help="KV heads, if not the shape's")
    made.add_argument("--head-dim", type=positive, help="size of a head, if not the shape's")
    made.add_argument("--window", type=positive, help="tokens that a token sees, itself included")
    made.add_argument(
        "--batch", type=positive, nargs="*", default=[1, 8, 32, 64, 256], help="rows of decodes"
    )
    made.add_argument("--context", type=positive, nargs="+", default=[1096], help="tokens of each row")
    made.add_argument("--long", type=positive, help="tokens of each batch's first row, if not as many")
    made.add_argument("--chunk", type=positive, nargs="*", default=[1024, 8192], help="prompt tokens at once")
    made.add_argument("--prefix", type=natural, default=0, help="tokens of the prompt that are cached")
    made.add_argument("--decode", nargs="+", choices=ATTENTION_DECODE[1:], help="backends of decodes")
    made.add_argument("--prefill", nargs="+", choices=ATTENTION_PREFILL[1:], help="backends of prompts")
    made.add_argument("--page-size", type=positive, default=16, help="tokens in a KV page")
    made.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"), help="numbers of the KV")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tells whether all works")
    made.add_argument("--rounds", type=positive, default=5, help="the median of so many is told")
    add_roof(made)
    made.add_argument("--json", action="store_true", help="end with one JSON object")
    args = read(made, batch=[1, 4], context=[128], chunk=[64])
    need_device(args.device)
    if smoke(args):
        torch.set_num_threads(1)  # more would only wait for one another
    geometry, norm = geometry_of(args)
    table = Table(
        f"{geometry.heads} heads over {geometry.kv_heads} of {geometry.head_dim}, page size {args.page_size}"
    )
    with torch.inference_mode():
        found = measure(args, geometry, norm, table)
    for line in slower_choices(found):
        print(f"  {line}")
    if args.json:
        told = {"options": vars(args), "machine": machine(args.device), "rows": table.rows}
        print(json.dumps(plain({**told, "attention": found})))


if __name__ == "__main__":
    main()
