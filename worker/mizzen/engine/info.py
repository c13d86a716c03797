# SPDX-License-Identifier: Apache-2.0
"""Description of a loaded engine, which does not change while the engine runs.

`mizzen.engine.loading.loader` creates it; the server reports its fields to gateways and as metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from mizzen.common.model_task import ScoreActivation, Task

log = logging.getLogger(__name__)

WEIGHT_FORMATS = ("bfloat16", "float16", "float32", "fp8", "int8", "int4", "mxfp4")
"""Formats of weights in memory. The scales and zero points of quantized weights count as their format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Sizes and identity of a loaded engine."""

    context_length: int
    """Maximum number of prompt plus output tokens of a request; it never exceeds the KV cache."""
    vocab_size: int
    end_token_ids: tuple[int, ...]
    """Ids of the tokens at which the model ends its output."""
    page_size: int
    pages_total: int
    weights_bytes: int
    kv_bytes: int
    dtype: str
    device: str
    implementation: str = "native"
    """Implementation of the model: "native" or "transformers"."""
    task: Task = Task.GENERATE
    """Task of the model."""
    labels: tuple[str, ...] = ()
    """Names of a classifier's labels, by index; empty for other tasks."""
    score_activation: ScoreActivation = ScoreActivation.NONE
    """Default activation of a classifier's logits."""
    pooling: str = ""
    """Pooling of the model: that of its files, or else the default of its architecture. Empty for the last
    token by default; may be the name of one that is not supported."""
    images: bool = False
    """Whether prompts may have images."""
    expert_groups: int = 0
    """Number of groups of ranks that hold different experts of a mixture; 0 for other models."""
    attention: tuple[str, str] = ("", "")
    """Names of the attention backends for decode and prefill."""
    step_bytes: int = 0
    """Bytes reserved for steps: slots, workspaces, activations and an estimate for graphs."""
    graph_bytes: int = 0
    """Bytes of GPU memory taken by the capture of graphs, including the kernels loaded for it; measured."""
    device_bytes: int = 0
    """Total memory of the GPU in bytes; on CPU, of the machine or of the container."""
    free_bytes: int = 0
    """Bytes of the device's memory that no process used when the engine had been loaded."""
    quantization: str = ""
    """Description of quantized weights, such as "AWQ: 4-bit integers, groups of 128"; empty for others."""
    format_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Bytes of weights by the format in which they are held, a value of `mizzen.engine.info.WEIGHT_FORMATS`;
    together `weights_bytes`."""
    phases: dict[str, float] = field(default_factory=dict)
    """Duration in seconds of each start-up phase: config, weights, kv, graphs (on CUDA), warmup."""

    @property
    def generates(self) -> bool:
        """Whether the model generates tokens; models without an LM head do not."""
        return self.task is Task.GENERATE

    @property
    def other_bytes(self) -> int:
        """Bytes in use besides weights, KV and graphs, such as the CUDA context; only a guess on CPU."""
        accounted = self.weights_bytes + self.kv_bytes + self.graph_bytes
        return max(0, self.device_bytes - self.free_bytes - accounted)


def log_loaded(info: EngineInfo) -> None:
    """Log memory sizes, attention backends and phase durations of the loaded engine."""
    decode, prefill = info.attention
    fields = {
        "model_implementation": info.implementation,
        "images": info.images,
        "expert_groups": info.expert_groups,
        "quantization": info.quantization,
        "weights_bytes": info.weights_bytes,
        "kv_bytes": info.kv_bytes,
        "kv_tokens": info.pages_total * info.page_size,
        "step_bytes": info.step_bytes,
        "graph_bytes": info.graph_bytes,
        "other_bytes": info.other_bytes,
        "free_bytes": info.free_bytes,
        "device_bytes": info.device_bytes,
        "attention_decode": decode,
        "attention_prefill": prefill,
        **{f"{name}_seconds": round(seconds, 3) for name, seconds in info.phases.items()},
    }
    log.info("the engine is loaded", extra={"fields": fields})
