# SPDX-License-Identifier: Apache-2.0
"""Hardware limits of the GPU benchmarks, computed from the bytes and operations of a model."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common_parts.arguments import above_zero, not_negative
from common_parts.machine_rates import measure_in_child_process
from mizzen.models.config import ModelConfig
from mizzen.quantization.schemes import MXFP4_BLOCK, Fp8Weights, Int8Weights, Mxfp4Weights, PackedIntegers

LEAST_SUM = {2: 2.9, 4: 7.0, 8: 7.0}
"""Minimum time of an all-reduce in microseconds, for each number of GPUs.

Measured on H200s with `allreduce.py`: one row, fastest method. For 8 GPUs, the value is the same as for 4.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Minimum times of a model on GPUs, computed from the bytes it moves and its operations.

    Several GPUs share weights, KV and operations evenly. Only `collectives` counts communication between
    them, because communication adds no time if it overlaps with computation. On a CPU all limits are NaN.
    """

    config: ModelConfig
    bandwidth: float
    """Memory bandwidth of one GPU in bytes per second."""
    flops: float
    """Floating-point operations per second of one GPU."""
    element: int = 2
    """Bytes per weight and per value in the residual stream."""
    body_element: float = 2.0
    """Bytes per weight of the layers, including scales."""
    expert_element: float | None = None
    """Bytes per weight of experts, including scales; None if it is `body_element`."""
    body_speed: float = 1.0
    """Speed of the layers' GEMMs relative to bfloat16: 2 if weights and inputs have 8 bits."""
    kv_element: int = 2
    """Bytes per value in the KV cache."""
    gpus: int = 1
    """Number of GPUs that share the model."""
    links: float = 450e9
    """Bytes per second that a GPU receives from all other GPUs."""
    least_sum: float = 0.0
    """Minimum seconds of an all-reduce, however small the message."""

    def count_body(self, experts: float) -> float:
        """Return the number of weights in all layers together; a layer with experts has `experts` of them."""
        c = self.config
        attention = c.hidden_size * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
        projections = 3 if (c.block.has_gate if c.encoder is None else c.encoder.has_gate) else 2
        width = c.layers * c.intermediate_size
        if c.experts is not None:
            sparse, shared = sum(c.experts.layers), c.experts.shared_width
            width += sparse * (experts * c.experts.width + shared - c.intermediate_size)
        return c.layers * attention + projections * c.hidden_size * width

    @property
    def body(self) -> float:
        """Number of weights in all layers together by which a token is multiplied."""
        return self.count_body(self.config.experts.per_token if self.config.experts else 0)

    def experts_read(self, rows: int) -> float:
        """Return the expected number of experts of a layer that `rows` rows choose, if they choose evenly."""
        experts = self.config.experts
        if experts is None:
            return 0.0
        return experts.count * (1 - (1 - experts.per_token / experts.count) ** rows)

    @property
    def head(self) -> int:
        """Number of weights of the LM head, which encoders do not have."""
        return 0 if self.config.encoder is not None else self.config.hidden_size * self.config.vocab_size

    def weight_bytes(self, rows: int) -> float:
        """Return the bytes of the weights that a step of `rows` rows reads."""
        experts = self.experts_read(rows)
        dense, read = self.count_body(0), self.count_body(experts)
        element = self.body_element if self.expert_element is None else self.expert_element
        return self.body_element * dense + element * (read - dense) + self.element * self.head

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token, in all layers together."""
        return 2 * self.config.layers * self.config.kv_heads * self.config.head_dim * self.kv_element

    def kv_bytes(self, context: float) -> float:
        """Return the bytes of KV that a token at the end of a context of that many tokens reads."""
        layers = (min(context, window or math.inf) for window in self.config.windows)
        return sum(layers) * self.token_bytes / self.config.layers

    def decode(self, batch: int, context: float) -> float:
        """Return the minimum seconds of a step that decodes `batch` rows of `context` tokens each."""
        return self.mixed(batch, context, 0)

    def mixed(self, batch: int, context: float, chunk: int, start: int = 0) -> float:
        """Return the minimum seconds of a step with decodes and `chunk` tokens behind `start` cached ones.

        The times of the GEMMs and of reading the KV add up: within a layer, GEMMs and attention wait for each
        other, and the KV of a large batch does not fit in the GPU's caches, so it cannot be prefetched.
        """
        body = 2 * self.body / self.body_speed
        operations = body * (batch + chunk) + 2 * self.head * (batch + bool(chunk))
        gemms = max(self.weight_bytes(batch + chunk) / self.bandwidth, operations / self.flops)
        attention = (self.operations(chunk, start) - body * chunk) / self.flops
        return (gemms + attention + batch * self.kv_bytes(context) / self.bandwidth) / self.gpus

    def operations(self, tokens: int, start: int = 0) -> float:
        """Return the number of operations to prefill `tokens` tokens that follow `start` cached tokens.

        Operations of faster GEMMs count for less. In an encoder, each token attends to all tokens.
        """
        c = self.config
        pairs = tokens * start + tokens * tokens / (2 if c.encoder is None else 1)
        return 2 * self.body / self.body_speed * tokens + 4 * c.layers * c.heads * c.head_dim * pairs

    def prefill(self, *prompts: int, start: int = 0) -> float:
        """Return the minimum seconds of prefilling prompts, all after the same `start` cached tokens.

        `prompts` are the numbers of tokens to compute. The limit is the time for their operations or the time
        to read all weights and the KV of the `start` tokens once, whichever is longer. The two do not add up:
        while GEMMs limit a step, the next layer's KV can be prefetched, because it fits in the GPU's L2 cache
        (33 MB per layer for 8,192 tokens of an 8B model). If reads limit a step, as when only a short rest of
        a prompt is computed, the times to read weights and KV add up.
        """
        operations = sum(self.operations(tokens, start) for tokens in prompts)
        bytes_read = self.weight_bytes(sum(prompts)) + start * self.token_bytes
        return max(operations / self.flops, bytes_read / self.bandwidth) / self.gpus

    @property
    def _remote_share(self) -> float:
        """Share of sharded data that a GPU does not hold itself."""
        return (self.gpus - 1) / self.gpus

    def all_reduce(self, rows: int) -> float:
        """Return the minimum seconds of an all-reduce of `rows` rows of the residual stream."""
        received = 2 * self._remote_share * rows * self.config.hidden_size * self.element
        return max(self.least_sum, received / self.links)

    def collectives(self, rows: int, sampled: int) -> float:
        """Return the minimum seconds of communication in a step of `rows` rows that samples `sampled` tokens.

        The communication consists of one all-reduce for the embedding, two all-reduces per layer, and the
        transfer of the logits to one GPU; none of it overlaps with other work.
        """
        if self.gpus == 1:
            return 0.0
        logits = self._remote_share * sampled * self.config.vocab_size * self.element
        return (2 * self.config.layers + 1) * self.all_reduce(rows) + logits / self.links


def add_roofline_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the limits of one GPU: memory bandwidth and operations per second."""
    parser.add_argument(
        "--bandwidth",
        type=above_zero,
        help="memory bandwidth of a GPU in TB/s, for the limits; by default measured before the run",
    )
    parser.add_argument(
        "--tflops",
        type=above_zero,
        help="bfloat16 TFLOP/s of a GPU, for the limits; by default measured before the run",
    )


def measure_roofline(args: argparse.Namespace) -> None:
    """Measure `args.bandwidth` and `args.tflops` unless they are given, print both, and store them in `args`.

    Call it before the process uses the GPU. Nothing is measured on a CPU. Exits if the measurement fails.
    """
    if args.device == "cpu":
        return
    given = (args.bandwidth, args.tflops)
    if None in given:
        try:
            rates = measure_in_child_process()
        except RuntimeError as error:
            sys.exit(f"error: {error}; give --bandwidth and --tflops")
        args.bandwidth = args.bandwidth or rates.bandwidth / 1e12
        args.tflops = args.tflops or rates.flops / 1e12
    sources = ["measured" if rate is None else "given" for rate in given]
    print(f"limits: {args.bandwidth:.2f} TB/s ({sources[0]}), {args.tflops:.0f} TFLOP/s ({sources[1]})")


def roofline_of(args: argparse.Namespace) -> tuple[float, float]:
    """Return the bytes per second and operations per second of one GPU for the limits; NaN on a CPU."""
    if args.device == "cpu":
        return math.nan, math.nan
    return args.bandwidth * 1e12, args.tflops * 1e12


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the limits of one or several GPUs."""
    add_roofline_options(parser)
    parser.add_argument(
        "--links",
        type=above_zero,
        default=450,
        help="GB/s that a GPU receives from all other GPUs, for the limits",
    )
    parser.add_argument(
        "--least-sum",
        type=not_negative,
        help="minimum microseconds of an all-reduce, for the limits; by default as measured",
    )


def weight_bytes(config: ModelConfig, element: int) -> float:
    """Return the bytes of a weight in the layers, which all have one scheme, with its scale.

    `element` is the number of bytes of an unquantized weight. MXFP4 stands for experts alone.
    """
    for scheme in config.quantization.schemes:
        if isinstance(scheme, PackedIntegers):
            return scheme.bits / 8 + (2 / scheme.group_size if scheme.group_size else 0)
        if not isinstance(scheme, Mxfp4Weights):
            return 1.0
    return float(element)


def expert_bytes(config: ModelConfig) -> float | None:
    """Return the bytes of a weight of experts with its scale if only experts are quantized, else None."""
    mxfp4 = any(isinstance(scheme, Mxfp4Weights) for scheme in config.quantization.schemes)
    return (4 + 8 / MXFP4_BLOCK) / 8 if mxfp4 else None


def gemm_speed(config: ModelConfig) -> float:
    """Return the speed of the layers' GEMMs, which all have one scheme, relative to bfloat16."""
    schemes = config.quantization.schemes
    in_8_bits = any(isinstance(scheme, Fp8Weights | Int8Weights) and scheme.activations for scheme in schemes)
    return 2.0 if in_8_bits else 1.0


def limits_of(args: argparse.Namespace, config: ModelConfig, options: Mapping[str, Any]) -> Limits:
    """Return the limits of a model on the hardware that `args` describe; `options` are the engine options."""
    bandwidth, flops = roofline_of(args)
    gpus, element = options["tensor"], 4 if options.get("dtype") == "float32" else 2
    least_sum = LEAST_SUM.get(gpus, 0.0) if args.least_sum is None else args.least_sum
    on_gpu = args.device != "cpu"
    return Limits(
        config=config,
        bandwidth=bandwidth,
        flops=flops,
        element=element,
        body_element=weight_bytes(config, element),
        expert_element=expert_bytes(config),
        body_speed=gemm_speed(config),
        kv_element=1 if options["kv_cache_dtype"] == "fp8" else element,
        gpus=gpus,
        links=args.links * 1e9 if on_gpu else math.nan,
        least_sum=least_sum * 1e-6 if on_gpu else math.nan,
    )
