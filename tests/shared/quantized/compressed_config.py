# SPDX-License-Identifier: Apache-2.0
"""`quantization_config` of compressed-tensors, with the fields that llm-compressor writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def describe_args(bits: int, kind: str, **changes: Any) -> dict[str, Any]:
    """Return the description of quantized weights or activations.

    Args:
        bits: Bits of a number.
        kind: "int" or "float".
        changes: Fields that differ from a static, symmetric scheme.
    """
    args = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": bits,
        "observer": None if changes.get("dynamic") else "minmax",
        "observer_kwargs": {},
        "strategy": "channel",
        "symmetric": True,
        "type": kind,
    }
    return args | changes


def compressed_config(
    name: str, weights: dict[str, Any], inputs: dict[str, Any] | None, ignored: Sequence[str]
) -> dict[str, Any]:
    """Return `quantization_config` of one group of all linear layers but the ignored ones.

    Args:
        name: `format`, such as "pack-quantized".
        weights: Description of the weights.
        inputs: Description of the activations; None if they are not quantized.
        ignored: Names of layers, or patterns after "re:".
    """
    group = {
        "input_activations": inputs,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": name,
        "global_compression_ratio": None,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "version": "0.12.2",
    }
