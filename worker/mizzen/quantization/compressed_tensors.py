# SPDX-License-Identifier: Apache-2.0
"""Reader of `quant_method` compressed-tensors, the format of llm-compressor.

Each entry of `config_groups` describes the weights and inputs of the layers that its targets name. A target
is the name of a layer, a regular expression after `re:`, or the class Linear, in this order of precedence.
"""

from __future__ import annotations

from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.quantization.config_fields import (
    USE_SERVED,
    parse_target,
    read_block,
    read_group_size,
    read_kv_scheme,
    read_names,
)
from mizzen.quantization.layer_patterns import PatternKind
from mizzen.quantization.quantization import LayerRule, Quantization, ignore_layers
from mizzen.quantization.schemes import (
    SUPPORTED_BITS,
    UNQUANTIZED,
    Activations,
    ActivationScales,
    Fp8Layout,
    Fp8Weights,
    Int8Weights,
    PackedIntegers,
    Packing,
    ScaleShape,
    WeightScheme,
)

LINEAR = "Linear"
FLOAT_FORMATS = ("float-quantized", "naive-quantized")
INTEGER_FORMATS = ("int-quantized", "naive-quantized")
PACKED_FORMAT = "pack-quantized"
UNSPECIFIC = (None, "mixed-precision", "dense", "int-quantized", "float-quantized", "naive-quantized")
REFUSED = {
    "nvfp4-pack-quantized": "NVFP4, for which Hopper GPUs have no tensor cores",
    "mxfp4-pack-quantized": "MXFP4, for which Hopper GPUs have no tensor cores",
    "mxfp8-quantized": "MXFP8",
    "marlin-24": "sparse weights",
    "sparse-24-bitmask": "sparse weights",
    "sparse-bitmask": "sparse weights",
}
"""Descriptions of formats that are not supported."""


def read_compressed_tensors(fields: Fields) -> Quantization:
    """Read `quant_method` compressed-tensors.

    Raises:
        ConfigError: A field is invalid or not supported.
    """
    _check_format(fields)
    sparsity = fields.child("sparsity_config").values.get("format", "dense")
    if sparsity != "dense":
        raise fields.unsupported(
            "sparsity_config", f"describes sparse weights ({sparsity}), which are not supported: {USE_SERVED}"
        )
    ignored = [parse_target(fields, "ignore", text) for text in read_names(fields, ("ignore",))]
    groups = fields.child("config_groups")
    by_kind: dict[PatternKind, list[LayerRule]] = {PatternKind.NAME: [], PatternKind.REGEX: []}
    default: WeightScheme = UNQUANTIZED
    for name in groups.values:
        group = groups.child(name)
        scheme = _read_group(group, fields)
        for target in read_names(group, ("targets",)) or [LINEAR]:
            if target == LINEAR:
                default = scheme
                continue
            pattern = parse_target(group, "targets", target)
            by_kind[pattern.kind].append(LayerRule(pattern, scheme))
    return Quantization(
        method="compressed-tensors" if groups.values else "",
        rules=(*ignore_layers(ignored), *by_kind[PatternKind.NAME], *by_kind[PatternKind.REGEX]),
        default=default,
        kv=read_kv_scheme(fields),
    )


def _check_format(fields: Fields) -> str | None:
    value = fields.values.get("format")
    if value is not None and not isinstance(value, str):
        raise fields.error("format", "must be a text")
    if value in REFUSED:
        raise fields.unsupported(
            "format", f"is {value}: {REFUSED[value]} are not supported; use a checkpoint in FP8 or W4A16"
        )
    return value


def _read_group(group: Fields, whole: Fields) -> WeightScheme:
    """Return the scheme of an entry of `config_groups`."""
    weights, inputs = group.child("weights"), group.child("input_activations")
    if not weights.values:
        if inputs.values:
            raise group.unsupported(
                "input_activations", f"is set without weights, which is not supported: {USE_SERVED}"
            )
        return UNQUANTIZED
    if group.child("output_activations").values:
        raise group.unsupported(
            "output_activations", f"describes quantized outputs, which are not supported: {USE_SERVED}"
        )
    kind, bits = weights.values.get("type", "int"), weights.integer("num_bits", 8)
    layout = _check_format(group) or whole.values.get("format")
    if kind == "float" and bits == 8:
        _require_format(group, layout, FLOAT_FORMATS)
        return _read_float(weights, _read_activations(inputs, weights))
    if kind == "float":
        raise weights.unsupported(
            "num_bits",
            f"is {bits} with type float (FP4), for which Hopper GPUs have no tensor cores: use a checkpoint "
            "in FP8 or W4A16",
        )
    if kind != "int":
        raise weights.error("type", "must be int or float")
    if layout == PACKED_FORMAT or (layout not in INTEGER_FORMATS and not inputs.values):
        return _read_packed(weights, inputs, bits)
    _require_format(group, layout, INTEGER_FORMATS)
    return _read_integer(weights, _read_activations(inputs, weights), bits)


def _require_format(group: Fields, layout: object, allowed: tuple[str, ...]) -> None:
    if layout not in allowed and layout not in UNSPECIFIC:
        raise ConfigError(
            f"{group.source}: the format {layout!r} is not supported for these weights: use a checkpoint in "
            f"the format {allowed[0]}"
        )


def _read_strategy(weights: Fields, allowed: tuple[str, ...]) -> str:
    """Read the strategy of weights; without one, it follows from the group size, as in the library."""
    value = weights.values.get("strategy")
    if value is None:
        value = "group" if weights.values.get("group_size") not in (None, -1) else "tensor"
    if value not in allowed:
        raise weights.error("strategy", f"must be {', '.join(allowed[:-1])} or {allowed[-1]}")
    return value


def _check_symmetric(weights: Fields) -> None:
    if not weights.flag("symmetric", True):
        raise weights.unsupported(
            "symmetric", f"is false, which is only supported for packed weights: {USE_SERVED}"
        )


def _read_float(weights: Fields, activations: Activations | None) -> Fp8Weights:
    _check_symmetric(weights)
    strategy = _read_strategy(weights, ("tensor", "channel", "block"))
    block = None
    if strategy == "block":
        block = read_block(weights, "block_structure")
        if block is None:
            raise weights.error("block_structure", "must list the rows and columns of a block")
    return Fp8Weights(
        scale_shape=ScaleShape(strategy),
        block=block,
        activations=activations,
        layout=Fp8Layout.COMPRESSED_TENSORS,
    )


def _read_integer(weights: Fields, activations: Activations | None, bits: int) -> Int8Weights:
    _check_symmetric(weights)
    if bits != 8:
        raise weights.unsupported(
            "num_bits", f"is {bits}, which is only supported in the format pack-quantized: {USE_SERVED}"
        )
    strategy = _read_strategy(weights, ("tensor", "channel", "group"))
    group_size = weights.integer("group_size") if strategy == "group" else None
    if group_size and activations:
        raise weights.unsupported(
            "strategy", f"is group, which is not supported with quantized inputs: {USE_SERVED}"
        )
    return Int8Weights(scale_shape=ScaleShape(strategy), group_size=group_size, activations=activations)


def _read_packed(weights: Fields, inputs: Fields, bits: int) -> PackedIntegers:
    if inputs.values:
        raise inputs.unsupported(
            "num_bits",
            f"is {inputs.values.get('num_bits')} with packed weights of {bits} bits, but packed weights are "
            f"only supported with unquantized inputs: use a checkpoint in W4A16",
        )
    if bits not in SUPPORTED_BITS:
        raise weights.unsupported("num_bits", f"is {bits}, but only 4 and 8 bits are supported: {USE_SERVED}")
    strategy = _read_strategy(weights, ("channel", "group"))
    order = weights.values.get("actorder")
    return PackedIntegers(
        bits=bits,
        group_size=read_group_size(weights, ("group_size",)) if strategy == "group" else None,
        symmetric=weights.flag("symmetric", True),
        activation_order=strategy == "group" and (order == "group" or order is True),
        packing=Packing.COMPRESSED_TENSORS,
    )


def _read_activations(inputs: Fields, weights: Fields) -> Activations | None:
    """Return the quantization of inputs; None if they are not quantized.

    Raises:
        ConfigError: They are quantized in another type than the weights, or in a way that is not supported.
    """
    if not inputs.values or inputs.values.get("num_bits") == 16:
        return None
    for name, default in (("num_bits", 8), ("type", "int")):
        if inputs.values.get(name, default) != weights.values.get(name, default):
            raise inputs.error(name, "must be that of the weights")
    symmetric = inputs.flag("symmetric", True)
    dynamic, strategy = inputs.values.get("dynamic", False), inputs.values.get("strategy", "tensor")
    if dynamic not in (True, False):
        raise inputs.error("dynamic", "must be true or false")
    if strategy == "group" and dynamic:
        return Activations(
            scales=ActivationScales.TOKEN_GROUP,
            group_size=inputs.integer("group_size"),
            symmetric=symmetric,
        )
    scales = {
        ("token", True): ActivationScales.TOKEN,
        ("tensor", True): ActivationScales.TENSOR,
        ("tensor", False): ActivationScales.STATIC,
    }.get((strategy, dynamic) if isinstance(strategy, str) else ("", False))
    if scales is None:
        raise inputs.error("strategy", f"must be token, tensor or group, or tensor if dynamic is {dynamic}")
    return Activations(scales=scales, symmetric=symmetric)
