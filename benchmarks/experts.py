# SPDX-License-Identifier: Apache-2.0
"""Time of a layer's mixture of experts by kernel, from input to output, with random weights on one GPU.

    python benchmarks/experts.py [--shape qwen3-30b-a3b] [--batch 1 8 32 64 128 512 8192] [--json]

Router and experts run in a captured graph for several random inputs, which choose different experts. The
rows `pytorch` are what models use without the kernels of `mizzen.kernels.experts`; the others are these
kernels with different tiles. The row that `HOPPER_PLAN` chooses is marked. Before it is timed, each output is
compared with that of a loop over experts. The limit is the time to read the experts chosen, or the time for
the operations, whichever is longer. The kernels of all shapes are compiled first, in parallel.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from common_parts.arguments import Help, jsonable, positive
from common_parts.engine_options import is_smoke_run, parse_args
from common_parts.gpu import require_device
from common_parts.layer_attention import dtype_of, seconds_of
from common_parts.limits import add_roofline_options, measure_roofline, roofline_of
from common_parts.machine_info import machine
from common_parts.tables import Table

from mizzen.layers.activation import ActivationFunction, ClampedSwiGLU
from mizzen.layers.context import BuildContext
from mizzen.layers.experts.biases import ExpertBiases
from mizzen.layers.experts.products import SortedProduct, make_product
from mizzen.layers.experts.router import ExpertRouter
from mizzen.models.block import Activation
from mizzen.models.experts_config import ExpertsConfig

INPUTS = 8
"""Number of inputs that a graph runs, so that few weights are in the L2 cache when they are read again."""
TOLERANCE = 0.02
"""Largest accepted difference of an output, relative to the largest output."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the experts of a model."""

    experts: int
    per_token: int
    hidden: int
    width: int
    clamped: bool = False
    """Whether experts have biases and the clamped SwiGLU of gpt-oss."""


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, clamped=True),
    "mixtral": Shape(8, 2, 4096, 14336),
    "tiny": Shape(9, 3, 64, 32),
}
Step = Callable[[torch.Tensor], torch.Tensor]
"""Function that runs x [tokens, hidden] through router and experts."""


class Layer:
    """Router and experts of one layer with random weights."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.dtype = shape, dtype_of(device)
        build = BuildContext(device=device, dtype=self.dtype, fused=device.type == "cuda")
        config = ExpertsConfig(
            count=shape.experts, per_token=shape.per_token, width=shape.width, layers=(True,)
        )
        self.router = ExpertRouter(build, config, shape.hidden, "")
        self.router.weight.normal_(0, shape.hidden**-0.5)
        self.gate_up = build.allocate(shape.experts, 2 * shape.width, shape.hidden)
        self.down = build.allocate(shape.experts, shape.hidden, shape.width)
        self.gate_up.normal_(0, shape.hidden**-0.5)
        self.down.normal_(0, shape.width**-0.5)
        self.activation: ActivationFunction = ActivationFunction(build, Activation.SILU)
        self.biases: ExpertBiases | None = None
        if shape.clamped:
            self.activation = ClampedSwiGLU(7.0, 1.702)
            gate_up = build.allocate(shape.experts, 2 * shape.width).normal_()
            self.biases = ExpertBiases(gate_up, build.allocate(shape.experts, shape.hidden).normal_())

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output for x, computed by a loop over experts."""
        product = SortedProduct(self.gate_up, self.down, self.activation, self.biases)
        return product(x, *self.router(x)).to(x.dtype)

    def steps(self, tokens: int) -> dict[str, Step]:
        """Return what may run a batch of that many tokens, by name; only `pytorch` on a CPU."""
        product = make_product(self.gate_up, self.down, self.activation, self.biases)
        steps: dict[str, Step] = {"pytorch": lambda x: product(x, *self.router(x)).to(x.dtype)}
        if not self.down.is_cuda:
            return steps
        from mizzen.layers.experts.kernel_product import KernelProduct, KernelRouter

        if not KernelProduct.supports(self.gate_up, self.down, self.activation):
            return steps
        experts = self.shape.experts
        kernels = KernelProduct(
            self.gate_up, self.down, self.activation, self.biases, product, experts=experts
        )
        router = KernelRouter(self.router)
        for name, variant in variants(tokens, tokens * self.shape.per_token / self.shape.experts).items():
            steps[name] = lambda x, variant=variant: kernels.run(x, *router(x), variant=variant)
        return steps

    def limit(self, x: torch.Tensor, bandwidth: float, flops: float) -> float:
        """Return the minimum seconds to run x through the experts that it chooses."""
        chosen = len(self.router(x)[0].unique())
        weights = 3 * self.shape.hidden * self.shape.width
        operations = 2 * len(x) * self.shape.per_token * weights
        return max(chosen * weights * self.dtype.itemsize / bandwidth, operations / flops)


def variants(tokens: int, per_expert: float) -> dict[str, Any]:
    """Return the variants of `KernelProduct` to measure, by name, for a batch of `tokens` tokens.

    `per_expert` is the mean number of pairs per expert; tiles that are much too small or large are left out.
    """
    from mizzen.kernels.experts.few_rows import FewRowsTile
    from mizzen.kernels.experts.grouped_gemm import GroupedTile
    from mizzen.layers.experts import kernel_plans as plans

    found: dict[str, Any] = {}
    if tokens <= 8:
        found["few"] = plans.FEW_ROWS
        found["few, wide"] = plans.FewRows(FewRowsTile(8, 2048, 8), FewRowsTile(2, 1024, 8))
        found["few, short"] = plans.FewRows(FewRowsTile(4, 1024, 4), FewRowsTile(1, 1024, 4))
    if per_expert <= 32:
        found["16, swap"] = plans.SMALL
        found["16, swap, shallow"] = plans.Grouped(
            GroupedTile(16, 64, 64, 6, 4, swap=True), GroupedTile(16, 128, 64, 4, 4, swap=True)
        )
        found["16, no swap"] = plans.Grouped(
            GroupedTile(16, 32, 128, 4, 4, swap=False), GroupedTile(16, 64, 128, 3, 4, swap=False)
        )
    if 4 <= per_expert <= 64:
        found["32, swap"] = plans.MEDIUM
    if per_expert >= 8:
        found["64"] = plans.LARGE
    if per_expert >= 16:
        for variant in many_rows_variants():
            found[f"many rows, cluster {variant.tile.cluster}"] = variant
    if per_expert >= 32:
        found["128"] = plans.PROMPTS
        for span in (4, 8, 16):
            found[f"128, span {span}"] = plans.Grouped(
                replace(plans.PROMPTS.gate_up, span=span), replace(plans.PROMPTS.down, span=span)
            )
    return found


def many_rows_variants() -> list[Any]:
    """Return the variants of the kernel of many rows to measure."""
    from mizzen.kernels.experts.many_rows import ManyRowsTile
    from mizzen.layers.experts.kernel_plans import ManyRows

    return [ManyRows(ManyRowsTile(144, 4, cluster)) for cluster in (1, 2)]


def capture(step: Step, inputs: list[torch.Tensor]) -> Callable[[], None]:
    """Capture a graph that runs all inputs, and return the replay; on a CPU, a function that runs them."""

    def run() -> None:
        for x in inputs:
            step(x)

    if not inputs[0].is_cuda:
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected value; infinite if it is NaN."""
    worst = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    return worst.item() if worst.isfinite() else float("inf")


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Check and time every variant for all batches of a shape; return microseconds by batch and variant."""
    device, shape = torch.device(args.device), SHAPES[name]
    layer, results, table = Layer(shape, device), dict[str, Any](), Table(name)
    for tokens in args.batch:
        count = INPUTS if tokens < 1024 and args.device == "cuda" else 1
        inputs = [torch.randn(tokens, shape.hidden, device=device).to(layer.dtype) for _ in range(count)]
        least = sum(layer.limit(x, *roofline_of(args)) for x in inputs) / count
        expected, chosen = layer.reference(inputs[0]), chosen_name(layer, tokens)
        results[str(tokens)] = {"limit_us": least * 1e6, "chosen": chosen, "kernels": {}}
        for kind, step in layer.steps(tokens).items():
            error = difference(step(inputs[0]), expected)
            took = seconds_of(capture(step, inputs), device, args.rounds) / count
            note = "chosen" if kind == chosen else ""
            if error > TOLERANCE:
                note += f" WRONG: differs by {error:.1%}"
            share = table.row(f"{tokens} tokens, {kind}", took * 1e6, least * 1e6, "us", note)
            results[str(tokens)]["kernels"][kind] = {"us": took * 1e6, "share": share, "error": error}
    return results


def chosen_name(layer: Layer, tokens: int) -> str:
    """Return the name of the variant that `HOPPER_PLAN` chooses for a batch."""
    if not layer.down.is_cuda:
        return "pytorch"
    from mizzen.layers.experts.kernel_plans import HOPPER_PLAN, ExpertSizes

    shape = layer.shape
    sizes = ExpertSizes(shape.experts, shape.hidden, shape.width)
    wanted = HOPPER_PLAN.variant(tokens, shape.per_token, sizes)
    named = variants(tokens, tokens * shape.per_token / shape.experts)
    return next((name for name, variant in named.items() if variant == wanted), "pytorch")


def compile_shape(name: str, batch: list[int]) -> None:
    """Run every variant of a shape once, which compiles its kernels into Triton's cache on disk."""
    layer = Layer(SHAPES[name], torch.device("cuda"))
    for tokens in batch:
        x = torch.randn(min(tokens, 9), layer.shape.hidden, device="cuda").to(layer.dtype)
        for step in layer.steps(tokens).values():
            step(x)
    torch.cuda.synchronize()


def compile_all(args: argparse.Namespace) -> None:
    """Compile the kernels of all shapes, each shape in a process of its own."""
    batch = [str(size) for size in args.batch]
    command = [sys.executable, __file__, "--compile-only", "--batch", *batch, "--shape"]
    children = [subprocess.Popen([*command, name]) for name in names_of(args)]
    codes = [child.wait() for child in children]
    if any(codes):
        sys.exit("error: the kernels of a shape cannot be compiled; see above")


def names_of(args: argparse.Namespace) -> list[str]:
    """Return the names of the shapes to measure."""
    return [name for name in SHAPES if name != "tiny"] if args.shape == "all" else [args.shape]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument(
        "--shape",
        choices=("all", *sorted(SHAPES)),
        default="all",
        help="model whose experts are measured; all but the tiny one by default",
    )
    parser.add_argument(
        "--batch", type=positive, nargs="+", default=[1, 8, 32, 64, 128, 512, 8192], help="numbers of tokens"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu only checks that everything works"
    )
    parser.add_argument("--rounds", type=positive, default=5, help="number of rounds; the median counts")
    parser.add_argument("--compile-only", action="store_true", help="compile kernels, and measure nothing")
    add_roofline_options(parser)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parse_args(parser, batch=[1, 8])
    require_device(args.device)
    with torch.inference_mode():
        if args.compile_only:
            for name in names_of(args):
                compile_shape(name, args.batch)
            return
        if args.device == "cuda":
            compile_all(args)
        measure_roofline(args)
        if is_smoke_run(args):
            torch.set_num_threads(1)  # more threads would only wait for each other
        results = {name: measure(args, name) for name in names_of(args)}
    if args.json:
        header = {"options": vars(args), "machine": machine(args.device)}
        print(json.dumps(jsonable({**header, "experts": results})))


if __name__ == "__main__":
    main()
