# SPDX-License-Identifier: Apache-2.0
"""Time of a model's GEMMs with few rows, by kernel, with random weights on one GPU.

    python benchmarks/products.py --shape qwen3-8b [--batch 1 8 16 32 64 128 256] [--tensor 2] [--json]

Each GEMM runs in a captured graph over several weights of its shape, which together are larger than the GPU's
caches. It is measured with the library that PyTorch calls, and with each kernel of `mizzen.kernels.gemm` that
supports it: `gemv`, `small_m` (small-M GEMM) and `swap_ab` (swap-AB GEMM). The kernel that a layer uses is
marked. The times of gate-up include SwiGLU. The limit is the time to read the weights or the time for the
operations, whichever is longer.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common_parts.arguments import Help, jsonable, positive
from common_parts.engine_options import is_smoke_run, parse_args
from common_parts.gpu import require_device
from common_parts.layer_attention import COLD_BYTES, LAYERS, dtype_of, seconds_of
from common_parts.limits import add_roofline_options, measure_roofline, roofline_of
from common_parts.machine_info import machine
from common_parts.shapes import SHAPES, config_of
from common_parts.tables import Table

from mizzen.layers.linear_methods.small_batch import MAX_BATCH_BEFORE_ATTENTION, max_small_batch
from mizzen.models.config import ModelConfig

Gemm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Function (weight [rows, columns], x [tokens, columns], out) that computes x times the transposed weight."""


def gemm_shapes(config: ModelConfig, ranks: int) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of each weight on one rank, by name."""
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
    """Return the GEMM of the library that PyTorch calls; with `gate`, followed by SwiGLU."""

    def plain(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(x, weight.t(), out=out)

    def gate_up(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        if device == "cuda":
            from mizzen.kernels.swiglu import gate_mul

            gate_mul(F.linear(x, weight))
        else:
            gates, ups = F.linear(x, weight).chunk(2, dim=-1)
            F.silu(gates).mul_(ups)

    return gate_up if gate else plain


def candidates(weight: torch.Tensor, rows: int, gate: bool) -> dict[str, Gemm]:
    """Return the GEMMs for a weight and `rows` rows of x, by name; `gate` adds SwiGLU to each of them."""
    kernels: dict[str, Gemm] = {"library": library_gemm(gate, weight.device.type)}
    if weight.device.type != "cuda":
        return kernels
    from mizzen.kernels.gemm import gemv, small_m, swap_ab

    if not gemv.supports(weight, swiglu=gate):
        return kernels
    if rows == 1:
        kernels["gemv"] = lambda weight, x, out: gemv.gemv(weight, x, out, swiglu=gate)
    if rows <= small_m.GROUP_ROWS * small_m.ROW_GROUPS[-1] and not weight.shape[1] % small_m.SEGMENT:
        kernels["small_m"] = lambda weight, x, out: small_m.small_m_gemm(weight, x, out, swiglu=gate)
    config = swap_ab.select_tile_config(*weight.shape, rows)
    if config is not None and not (gate and weight.shape[0] % 16):
        kernels["swap_ab"] = lambda weight, x, out: swap_ab.swap_ab_gemm(weight, x, out, swiglu=gate)
    return kernels


def chosen_kernel(name: str, weight: torch.Tensor, rows: int) -> str:
    """Return the name of the GEMM that the layer `name` uses for `rows` rows of x."""
    if weight.device.type != "cuda":
        return "library"
    from mizzen.kernels.gemm import small_m

    most = max_small_batch(weight, swiglu=name == "gate-up")
    if name == "qkv":
        size = weight.numel()
        most = min(most, next((limit for weights, limit in MAX_BATCH_BEFORE_ATTENTION if size <= weights), 0))
    if rows > most:
        return "library"
    return "gemv" if rows == 1 else "small_m" if rows <= small_m.max_batch(weight) else "swap_ab"


def capture(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Capture `step` in a CUDA graph, and return the replay function; on a CPU, return `step` itself."""
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
    """Measure the GEMM `name` for `rows` rows of x with each kernel; return the figures in microseconds."""
    gate, (height, columns), device = name == "gate-up", weights[0].shape, weights[0].device
    x = torch.randn(rows, columns, dtype=weights[0].dtype, device=device)
    out = torch.empty(rows, height // (1 + gate), dtype=x.dtype, device=device)
    bandwidth, flops = roofline_of(args)
    least = max(2 * height * columns / bandwidth, 2 * rows * height * columns / flops)
    chosen = chosen_kernel(name, weights[0], rows)
    result: dict[str, Any] = {"limit_us": least * 1e6, "chosen": chosen, "kernels": {}}
    for kernel, gemm in candidates(weights[0], rows, gate).items():

        def step(gemm: Gemm = gemm) -> None:
            for weight in weights:
                gemm(weight, x, out)

        took = seconds_of(capture(step, device), device, args.rounds) / len(weights)
        note = "chosen" if kernel == chosen else ""
        share = table.row(f"{name}, {rows} rows, {kernel}", took * 1e6, least * 1e6, "us", note)
        result["kernels"][kernel] = {"us": took * 1e6, "share": share}
    return result


def measure(args: argparse.Namespace, config: ModelConfig, table: Table) -> dict[str, dict[str, Any]]:
    """Measure each GEMM of a model with each number of rows in `args.batch`; the keys are "NAME ROWS"."""
    device, results = torch.device(args.device), dict[str, dict[str, Any]]()
    for name, (height, columns) in gemm_shapes(config, args.tensor).items():
        size = height * columns * dtype_of(device).itemsize
        count = min(LAYERS, max(2, math.ceil(COLD_BYTES / size))) if args.device == "cuda" else 1
        weights = [
            torch.randn(height, columns, dtype=dtype_of(device), device=device) / columns**0.5
            for _ in range(count)
        ]
        for rows in args.batch:
            results[f"{name} {rows}"] = measure_one(args, table, name, weights, rows)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="qwen3-8b", help="model whose GEMMs are measured"
    )
    parser.add_argument(
        "--tensor",
        type=positive,
        default=1,
        help="GPUs that share the model; the shard of one GPU is measured",
    )
    parser.add_argument(
        "--batch", type=positive, nargs="+", default=[1, 8, 16, 32, 64, 128, 256], help="numbers of rows of x"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu only checks that everything works"
    )
    parser.add_argument("--rounds", type=positive, default=5, help="number of rounds; the median counts")
    add_roofline_options(parser)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parse_args(parser, batch=[1, 8])
    require_device(args.device)
    measure_roofline(args)
    if is_smoke_run(args):
        torch.set_num_threads(1)  # more threads would only wait for each other
    table = Table(args.shape + (f", one of {args.tensor} GPUs" if args.tensor > 1 else ""))
    with torch.inference_mode():
        results = measure(args, config_of(args.shape), table)
    if args.json:
        header = {"options": vars(args), "machine": machine(args.device), "rows": table.rows}
        print(json.dumps(jsonable({**header, "products": results})))


if __name__ == "__main__":
    main()
