"""What GPUs can do at most with a model: the limits beside the figures of the GPU benchmarks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arguments import above_zero, not_negative

from mizzen.models.config import ModelConfig

LEAST_SUM = {2: 2.9, 4: 7.0, 8: 7.0}
"""Microseconds of a sum over so many H200s: one row, as `allreduce.py` measures its fastest way; 8 as 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What GPUs can do at most with a model, from bytes moved and operations done (those of bfloat16).

    Several share weights, KV and operations evenly. What they have to tell one another is counted by
    `collectives` alone: it costs no time where something else is computed meanwhile.
    What another device can do is not known: all limits are NaN then.
    """

    config: ModelConfig
    bandwidth: float
    """Bytes a second."""
    flops: float
    """Operations a second."""
    element: int = 2
    """Bytes of a weight, and of a number in the residual stream."""
    kv_element: int = 2
    """Bytes of a number in the KV cache."""
    gpus: int = 1
    links: float = 450e9
    """Bytes a second that a GPU gets from the others."""
    least_sum: float = 0.0
    """Seconds that a sum over the GPUs takes at least, however short."""

    @property
    def body(self) -> int:
        """Weights of all layers."""
        c = self.config
        attention = c.hidden_size * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
        return c.layers * (attention + 3 * c.hidden_size * c.intermediate_size)

    @property
    def head(self) -> int:
        """Weights of the output head."""
        return self.config.hidden_size * self.config.vocab_size

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return 2 * self.config.layers * self.config.kv_heads * self.config.head_dim * self.kv_element

    def decode(self, batch: int, context: float) -> float:
        """Seconds of a step that decodes `batch` rows of `context` tokens each.

        Products and reading KV are added: in a layer each waits for the other, and the KV of a large batch
        fits in no cache of the GPU, to be read ahead.
        """
        weights = self.body + self.head
        products = max(self.element * weights / self.bandwidth, 2 * weights * batch / self.flops)
        return (products + batch * context * self.token_bytes / self.bandwidth) / self.gpus

    def operations(self, tokens: int, start: int = 0) -> float:
        """Operations of running `tokens` prompt tokens behind `start` others."""
        c = self.config
        pairs = tokens * start + tokens * tokens / 2
        return 2 * self.body * tokens + 4 * c.layers * c.heads * c.head_dim * pairs

    def prefill(self, *prompts: int, start: int = 0) -> float:
        """Seconds of running prompts of so many tokens each, behind `start` others that all of them share.

        That is the longer of their operations and of what is read for them at least: all weights once, and
        the KV of the `start` tokens once. Operations and reading are not added: while products hold a step,
        the next layer's KV can be read ahead, whose 33 MB for 8192 tokens of an 8B model fit in the GPU's
        cache. Where reading holds it, as it does with a short rest of a prompt, weights and KV do add.
        """
        operations = sum(self.operations(tokens, start) for tokens in prompts)
        read = self.element * (self.body + self.head) + start * self.token_bytes
        return max(operations / self.flops, read / self.bandwidth) / self.gpus

    @property
    def _elsewhere(self) -> float:
        """The share of what is split that a GPU does not have itself."""
        return (self.gpus - 1) / self.gpus

    def sum(self, rows: int) -> float:
        """Seconds of a sum over the GPUs of `rows` rows of the residual stream; all of them get it."""
        received = 2 * self._elsewhere * rows * self.config.hidden_size * self.element
        return max(self.least_sum, received / self.links)

    def collectives(self, rows: int, drawn: int) -> float:
        """Seconds of what GPUs tell one another in a step of `rows` rows, `drawn` of which draw a token.

        One sum for the embedding and two a layer, each waited for, and the logits on their way to one GPU.
        """
        if self.gpus == 1:
            return 0.0
        logits = self._elsewhere * drawn * self.config.vocab_size * self.element
        return (2 * self.config.layers + 1) * self.sum(rows) + logits / self.links


def add_roof(made: argparse.ArgumentParser) -> None:
    """Add the options that limits of one GPU are computed with."""
    made.add_argument(
        "--bandwidth", type=above_zero, default=4.28, help="TB/s that the limit is computed with"
    )
    made.add_argument(
        "--tflops", type=above_zero, default=799, help="TFLOP/s that the limit is computed with"
    )


def roof_of(args: argparse.Namespace) -> tuple[float, float]:
    """Return the bytes and the operations a second that limits are computed with; NaN on a CPU."""
    if args.device == "cpu":
        return math.nan, math.nan
    return args.bandwidth * 1e12, args.tflops * 1e12


def add_limits(made: argparse.ArgumentParser) -> None:
    """Add the options that limits are computed with."""
    add_roof(made)
    made.add_argument("--links", type=above_zero, default=450, help="GB/s that a GPU gets from others")
    made.add_argument(
        "--least-sum",
        type=not_negative,
        help="microseconds of the shortest sum over GPUs; by default as measured",
    )


def limits_of(args: argparse.Namespace, config: ModelConfig, options: Mapping[str, Any]) -> Limits:
    """Return what the chosen GPUs can do at most; `options` are those that the engine was given."""
    bandwidth, flops = roof_of(args)
    gpus, element = options["tensor"], 4 if options.get("dtype") == "float32" else 2
    least_sum = LEAST_SUM.get(gpus, 0.0) if args.least_sum is None else args.least_sum
    known = args.device != "cpu"
    return Limits(
        config=config,
        bandwidth=bandwidth,
        flops=flops,
        element=element,
        kv_element=1 if options["kv_cache_dtype"] == "fp8" else element,
        gpus=gpus,
        links=args.links * 1e9 if known else math.nan,
        least_sum=least_sum * 1e-6 if known else math.nan,
    )
