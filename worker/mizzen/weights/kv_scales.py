# SPDX-License-Identifier: Apache-2.0
"""Folds a checkpoint's scales for an 8-bit KV cache into the weights around the cache.

The cache holds keys and values that have been divided by scales. The scales are folded into weights, so that
kernels need no scales (see `SelfAttention.scale_kv`). Scales are rounded up to powers of two, so that the
weights are scaled exactly. The rounding costs no precision in the cache: e4m3 is a floating-point format, so
a power of two only shifts its range.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mizzen.layers.attention import SelfAttention
from mizzen.models.text_tensors import TextTensors
from mizzen.weights.checkpoint_files import WeightsError, checkpoint_files
from mizzen.weights.load import own_name

SCALE = re.compile(
    r"^model\.layers\.(\d+)\.self_attn\."
    r"(?:(?:attn\.|qkv_proj\.)?([kv])_scale|([kv])_proj\.(?:[kv]_scale|output_scale))$"
)
"""Name of a scale in a checkpoint. ModelOpt writes scales to `k_proj` and `v_proj`, llm-compressor to the
attention itself or to a fused `qkv_proj`."""

KVScales = dict[int, tuple[float, float]]
"""For each layer: the scale of its keys and the scale of its values, both powers of two."""


def round_up_to_power_of_two(scale: float) -> float:
    """Return the smallest power of two that is at least `scale`."""
    return 2.0 ** math.ceil(math.log2(scale))


def read_kv_scales(folder: Path, text_tensors: TextTensors | None = None) -> KVScales:
    """Read the scales of a checkpoint; the result lacks layers without scales.

    `text_tensors` describes the text part, if the checkpoint also holds other parts.

    Raises:
        WeightsError: a scale is not a positive number, or a file cannot be read.
    """
    scales_by_layer: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for path in checkpoint_files(folder):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    match = SCALE.match(own_name(name, text_tensors) or "")
                    if match is None:
                        continue
                    tensor = file.get_tensor(name)
                    value = tensor.float().max().item() if tensor.numel() else 0.0
                    if not 0 < value < math.inf:
                        raise WeightsError(f"{path}: {name} must be a positive number, not {value}")
                    scales_by_layer[int(match[1])][match[2] or match[3]] = round_up_to_power_of_two(value)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} cannot be read: {error}") from error
    return {layer: (scales.get("k", 1.0), scales.get("v", 1.0)) for layer, scales in scales_by_layer.items()}


def fold_kv_scales(layers: Sequence[SelfAttention], scales: KVScales) -> None:
    """Fold `scales` into the weights of the model's attention layers, which must be loaded and finished."""
    with torch.inference_mode():
        for layer, (keys, values) in scales.items():
            if layer < len(layers):
                layers[layer].scale_kv(keys, values)
