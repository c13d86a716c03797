"""Folds a checkpoint's scales for an 8-bit KV cache into the weights around the cache.

The cache holds keys and values that have been divided by scales. The scales are folded into weights, so that
kernels need no scales. The weights that produce keys are divided by the key scale, and the weights that
produce queries are multiplied by it. The weights that produce values are divided by the value scale, and the
output projection is multiplied by it. Scales are rounded up to powers of two, so that the weights are scaled
exactly. The rounding costs no precision in the cache: e4m3 is a floating-point format, so a power of two only
shifts its range.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mizzen.layers.weight_target import WeightTarget
from mizzen.models.text_tensors import TextTensors
from mizzen.weights.checkpoint_files import WeightsError, checkpoint_files
from mizzen.weights.load import own_name

SCALE = re.compile(
    r"^model\.layers\.(\d+)\.self_attn\.(?:(?:attn\.)?([kv])_scale|([kv])_proj\.(?:[kv]_scale|output_scale))$"
)
AFFECTED_WEIGHT = re.compile(
    r"^model\.layers\.(\d+)\.self_attn\.(q_norm|k_norm|q_proj|k_proj|v_proj|o_proj)\.(\w+)$"
)

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


def fold_kv_scales(targets: Iterable[WeightTarget], scales: KVScales) -> None:
    """Fold `scales` into the weights of the model's attention layers; all targets must already be loaded."""
    matches = [(match, target) for target in targets if (match := AFFECTED_WEIGHT.match(target.name))]
    normed = {match[1] for match, _ in matches if match[2] == "k_norm"}
    with torch.inference_mode():
        for match, target in matches:
            keys, values = scales.get(int(match[1]), (1.0, 1.0))
            # QK norm cancels the scale of the projection before it, so the norm's weight is scaled instead.
            last_of_keys = "norm" if match[1] in normed else "proj"
            factors = {
                f"q_{last_of_keys}": keys,
                f"k_{last_of_keys}": 1 / keys,
                "v_proj": 1 / values,
                "o_proj": values if match[3] == "weight" else 1.0,
            }
            factor = factors.get(match[2], 1.0)
            if factor != 1:
                target.destination.mul_(factor)
