"""Time of a model's GEMMs with few rows, by kernel, with random weights on one GPU.

    python benchmarks/products.py --shape qwen3-8b [--batch 1 8 16 32 64 128 256] [--tensor 2] [--json]

Each GEMM runs in a captured graph over several weights of its shape, more than the GPU's caches hold: by the library
that PyTorch calls, and by each kernel of `mizzen.kernels` that supports it (`skinny` is the small-M GEMM, `wide` the
swap-AB GEMM). The kernel that a layer uses is marked. gate-up includes SwiGLU. The limit is the longer of reading
the weights and of the operations.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from arguments import Help, plain, positive
from engine_choices import read, smoke
from layer_attention import COLD_BYTES, LAYERS, dtype_of, seconds_of
from limits import add_roof, roof_of
from ran_on import machine
from shapes import SHAPES, config_of
from tables import Table

from gpu import need_device
from mizzen.layers.linear import WIDEST_BEFORE_ATTENTION, widest_product
from mizzen.models.config import ModelConfig

Gemm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Function of (weight [rows, columns], x [tokens, columns], out) that multiplies x with the transposed weight."""


def gemm_shapes(config: ModelConfig, ranks: int) -> dict[str, tuple[int, int]]:
    """Return rows and columns of each weight on one rank."""
    heads, kv_heads = config.heads // ranks, max(1, config.kv_heads // ranks)
    middle = config.intermediate_size // ranks
    return {
        "qkv": ((heads + 2 * kv_heads) * config.head_dim, config.hidden_size),
        "o": (config.hidden_size, heads * config.head_dim),
        "gate-up": (2 * middle, config.hidden_size),
        "down": (config.hidden_size, middle),
        "head": (-(-config.vocab_size // ranks), config.hidden_size),
    }


def library_gemm(gate: bool, device: str) -> Gemm:
    """Return the GEMM of PyTorch's library; `gate` includes SwiGLU."""

    def plain(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(x, weight.t(), out=out)

    def gate_up(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        if device == "cuda":
            from mizzen.kernels.swiglu import silu_mul

            silu_mul(F.linear(x, weight))
        else:
            gates, ups = F.linear(x, weight).chunk(2, dim=-1)
            F.silu(gates).mul_(ups)

    return gate_up if gate else plain


def candidates(weight: torch.Tensor, rows: int, gate: bool) -> dict[str, Gemm]:
    """Return the kernels that can multiply `rows` rows with a weight, by name."""
    kernels: dict[str, Gemm] = {"library": library_gemm(gate, weight.device.type)}
    if weight.device.type != "cuda":
        return kernels
    from mizzen.kernels.gemm import gemv, small_m, swap_ab

    if not gemv.serves(weight, gate=gate):
        return kernels
    if rows == 1:
        kernels["gemv"] = lambda weight, x, out: gemv.gemv(weight, x, out, gate=gate)
    if rows <= small_m.PART * small_m.PARTS[-1] and not weight.shape[1] % small_m.SEGMENT:
        kernels["skinny"] = lambda weight, x, out: small_m.skinny(weight, x, out, gate=gate)
    cut = swap_ab.cut_of(*weight.shape, rows)
    if cut is not None and not (gate and weight.shape[0] % 16):
        kernels["wide"] = lambda weight, x, out: swap_ab.wide(weight, x, out, gate=gate)
    return kernels


def chosen_kernel(name: str, weight: torch.Tensor, rows: int) -> str:
    """Return the name of the kernel that a layer uses."""
    if weight.device.type != "cuda":
        return "library"
    from mizzen.kernels.gemm import small_m

    most = widest_product(weight, gate=name == "gate-up")
    if name == "qkv":
        size = weight.numel()
        most = min(most, next((limit for weights, limit in WIDEST_BEFORE_ATTENTION if size <= weights), 0))
    if rows > most:
        return "library"
    return "gemv" if rows == 1 else "skinny" if rows <= small_m.widest(weight) else "wide"


def capture(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return the replay function of a graph of `step`, or `step` itself on a CPU."""
    if device.type != "cuda":
        return step
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure_one(
    args: argparse.Namespace, table: Table, name: str, weights: list[torch.Tensor], rows: int
) -> dict[str, Any]:
    """Measure a GEMM with `rows` rows by each kernel; return the figures in microseconds."""
    gate, (height, columns), device = name == "gate-up", weights[0].shape, weights[0].device
    x = torch.randn(rows, columns, dtype=weights[0].dtype, device=device)
    out = torch.empty(rows, height // (1 + gate), dtype=x.dtype, device=device)
    bandwidth, flops = roof_of(args)
    least = max(2 * height * columns / bandwidth, 2 * rows * height * columns / flops)
    taken = chosen(name, weights[0], rows)
    found: dict[str, Any] = {"limit_us": least * 1e6, "chosen": taken, "kernels": {}}
    for way, product in candidates(weights[0], rows, gate).items():

        def step(product: Product = product) -> None:
            for weight in weights:
                product(weight, x, out)

        took = seconds_of(captured(step, device), device, args.rounds) / len(weights)
        note = "chosen" if way == taken else ""
        share = table.row(f"{name}, {rows} rows, {way}", took * 1e6, least * 1e6, "us", note)
        found["kernels"][way] = {"us": took * 1e6, "share": share}
    return found


def measure(args: argparse.Namespace, config: ModelConfig, table: Table) -> dict[str, dict[str, Any]]:
    """Measure all products for each number of rows."""
    device, found = torch.device(args.device), dict[str, dict[str, Any]]()
    for name, (height, columns) in gemm_shapes(config, args.tensor).items():
        size = height * columns * dtype_of(device).itemsize
        count = min(LAYERS, max(2, math.ceil(COLD_BYTES / size))) if args.device == "cuda" else 1
        weights = [
            torch.randn(height, columns, dtype=dtype_of(device), device=device) / columns**0.5
            for _ in range(count)
        ]
        for rows in args.batch:
            found[f"{name} {rows}"] = measure_one(args, table, name, weights, rows)
    return found


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    made.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b", help="model whose GEMMs are measured")
    made.add_argument(
        "--tensor", type=positive, default=1, help="GPUs that share the model; the shard of one is measured"
    )
    made.add_argument("--batch", type=positive, nargs="+", default=[1, 8, 16, 32, 64, 128, 256], help="rows")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tells whether all works")
    made.add_argument("--rounds", type=positive, default=5, help="the median of so many is told")
    add_roof(made)
    made.add_argument("--json", action="store_true", help="end with one JSON object")
    args = read(made, batch=[1, 8])
    need_device(args.device)
    if smoke(args):
        torch.set_num_threads(1)  # more would only wait for one another
    table = Table(args.shape + (f", one of {args.tensor} GPUs" if args.tensor > 1 else ""))
    with torch.inference_mode():
        found = measure(args, config_of(args.shape), table)
    if args.json:
        told = {"options": vars(args), "machine": machine(args.device), "rows": table.rows}
        print(json.dumps(plain({**told, "products": found})))


if __name__ == "__main__":
    main()
