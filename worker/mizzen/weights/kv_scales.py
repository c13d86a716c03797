"""Scales of an 8-bit KV cache, which a checkpoint may hold: what a key or value is divided by in the cache.

They are folded into the weights around the cache, so that no kernel has to know them: keys come divided and
queries multiplied, values come divided and the output projection multiplies. A scale is rounded up to a power
of two, with which both are exact: e4m3 is a float, so that nothing but its range moves.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mizzen.layers.context import WeightTarget
from mizzen.weights.load import WeightsError, checkpoint_files

SCALE = re.compile(
    r"^model\.layers\.(\d+)\.self_attn\.(?:(?:attn\.)?([kv])_scale|([kv])_proj\.(?:[kv]_scale|output_scale))$"
)
PART = re.compile(r"^model\.layers\.(\d+)\.self_attn\.(q_norm|k_norm|q_proj|k_proj|v_proj|o_proj)\.(\w+)$")

Scales = dict[int, tuple[float, float]]
"""By layer: of keys, of values; powers of two."""


def round_up_to_power_of_two(scale: float) -> float:
    """Return the next power of two."""
    return 2.0 ** math.ceil(math.log2(scale))


def read_kv_scales(folder: Path) -> Scales:
    """Read the scales of a checkpoint; layers without have 1.

    Raises:
        WeightsError: a scale is no positive number, or a file cannot be read.
    """
    found: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for path in checkpoint_files(folder):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    match = SCALE.match(name)
                    if match is None:
                        continue
                    tensor = file.get_tensor(name)
                    value = tensor.float().max().item() if tensor.numel() else 0.0
                    if not 0 < value < math.inf:
                        raise WeightsError(f"{path}: {name} must be a positive number, not {value}")
                    found[int(match[1])][match[2] or match[3]] = round_up_to_power_of_two(value)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} cannot be read: {error}") from error
    return {layer: (scales.get("k", 1.0), scales.get("v", 1.0)) for layer, scales in found.items()}


def fold_kv_scales(targets: Iterable[WeightTarget], scales: Scales) -> None:
    """Multiply and divide the weights around the cache; they must be loaded already."""
    parts = [(match, target) for target in targets if (match := PART.match(target.name))]
    normed = {match[1] for match, _ in parts if match[2] == "k_norm"}
    with torch.inference_mode():
        for match, target in parts:
            keys, values = scales.get(int(match[1]), (1.0, 1.0))
            # What follows a norm has the norm's scale, whatever the projection's.
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
