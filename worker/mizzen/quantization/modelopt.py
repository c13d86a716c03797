# SPDX-License-Identifier: Apache-2.0
"""Reader of ModelOpt's configurations: `hf_quant_config.json`, and `quant_method` modelopt in config.json."""

from __future__ import annotations

from mizzen.models.hf_fields import Fields
from mizzen.quantization.config_fields import read_kv_scheme, read_patterns
from mizzen.quantization.layer_patterns import LayerPattern, PatternKind
from mizzen.quantization.quantization import LayerRule, Quantization, ignore_layers
from mizzen.quantization.schemes import (
    UNQUANTIZED,
    Activations,
    ActivationScales,
    Fp8Layout,
    Fp8Weights,
    KvScheme,
    ScaleShape,
    WeightScheme,
)

IGNORED = ("exclude_modules", "ignore")
BLOCK = (128, 128)
ALGORITHMS: dict[str, WeightScheme] = {
    "FP8": Fp8Weights(
        scale_shape=ScaleShape.TENSOR,
        activations=Activations(scales=ActivationScales.STATIC),
        layout=Fp8Layout.MODELOPT,
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Weights(
        scale_shape=ScaleShape.CHANNEL,
        activations=Activations(scales=ActivationScales.TOKEN),
        layout=Fp8Layout.MODELOPT,
    ),
    "FP8_PB_WO": Fp8Weights(
        scale_shape=ScaleShape.BLOCK, block=BLOCK, activations=None, layout=Fp8Layout.MODELOPT
    ),
}
"""Schemes by `quant_algo`."""
MIXED = "MIXED_PRECISION"


def read_modelopt(fields: Fields) -> Quantization:
    """Read ModelOpt's configuration; in `hf_quant_config.json`, it is the object `quantization`.

    Raises:
        ConfigError: A field is invalid, or an algorithm is not supported.
    """
    nested = fields.child("quantization")
    fields = nested if nested.values else fields
    ignored = list(read_patterns(fields, IGNORED, PatternKind.GLOB))
    ignored += [
        LayerPattern(pattern.text, PatternKind.MODULE) for pattern in ignored if "*" not in pattern.text
    ]
    rules, default = list(ignore_layers(ignored)), UNQUANTIZED
    algorithm = fields.values.get("quant_algo")
    if algorithm == MIXED:
        layers = fields.child("quantized_layers")
        for name in layers.values:
            pattern = LayerPattern(name, PatternKind.GLOB)
            rules.append(LayerRule(pattern, _read_algorithm(layers.child(name))))
    elif algorithm is not None:
        default = _read_algorithm(fields)
    return Quantization(
        method="ModelOpt" if algorithm else "",
        rules=tuple(rules),
        default=default,
        kv=_read_kv(fields),
    )


def _read_algorithm(fields: Fields) -> WeightScheme:
    value = fields.values.get("quant_algo")
    scheme = ALGORITHMS.get(value.upper()) if isinstance(value, str) else None
    if scheme is None:
        raise fields.unsupported(
            "quant_algo",
            f"is {value!r}, but of ModelOpt's algorithms only {', '.join(ALGORITHMS)} are supported: Hopper "
            "GPUs have no FP4 tensor cores; use the checkpoint in FP8",
        )
    return scheme


def _read_kv(fields: Fields) -> KvScheme | None:
    value = fields.values.get("kv_cache_quant_algo")
    if value is None:
        return read_kv_scheme(fields)
    if not isinstance(value, str) or value.upper() != "FP8":
        raise fields.unsupported(
            "kv_cache_quant_algo", f"is {value!r}, but no KV cache other than FP8 is supported"
        )
    return KvScheme()
