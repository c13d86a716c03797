# SPDX-License-Identifier: Apache-2.0
"""Readers of AWQ, GPTQ and AutoRound: weights alone in packed integers of 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from mizzen.models.hf_fields import Fields
from mizzen.quantization.config_fields import (
    OUTPUT_HEAD,
    USE_SERVED,
    parse_regex,
    read_group_size,
    read_names,
    read_patterns,
)
from mizzen.quantization.layer_patterns import LayerPattern, PatternKind
from mizzen.quantization.quantization import LayerRule, Quantization, ignore_layers
from mizzen.quantization.schemes import (
    SUPPORTED_BITS,
    UNQUANTIZED,
    PackedIntegers,
    Packing,
    WeightScheme,
)

BITS = ("bits", "w_bit", "wbits", "num_bits")
GROUP_SIZE = ("group_size", "q_group_size", "groupsize")
MODULES = "modules_in_block_to_quantize"
GPTQ_FORMATS = {"gptq": Packing.GPTQ, "gptq_v2": Packing.GPTQ_V2}
AUTO_ROUND_FORMATS = {
    "auto_round:auto_gptq": Packing.GPTQ,
    "auto_round:auto_awq": Packing.AWQ,
    "auto_round:awq": Packing.AWQ,
}
"""Packings by `packing_format` of AutoRound."""


def read_bits(fields: Fields, default: int | None = None) -> int:
    """Read the number of bits of the weights.

    Raises:
        ConfigError: It is missing, or neither 4 nor 8.
    """
    name = fields.first_set(BITS)
    bits = fields.integer(name, default)
    if bits not in SUPPORTED_BITS:
        raise fields.unsupported(name, f"is {bits}, but only 4 and 8 bits are supported: {USE_SERVED}")
    return bits


def read_awq(fields: Fields) -> Quantization:
    """Read `quant_method` awq.

    Raises:
        ConfigError: A field is invalid, or the version is not gemm.
    """
    name = fields.first_set(("version", "checkpoint_format", "format"))
    version = str(fields.values.get(name) or "gemm").lower()
    if version != "gemm":
        raise fields.unsupported(
            name,
            f"is {version!r}, but only the layout gemm of AWQ is supported: use a checkpoint with version "
            "gemm, or one in the format compressed-tensors",
        )
    if not fields.flag("zero_point", True):
        raise fields.unsupported(
            "zero_point", f"is false, but AWQ is only supported with zero points: {USE_SERVED}"
        )
    if (bits := read_bits(fields, 4)) != 4:
        raise fields.unsupported(
            fields.first_set(BITS), f"is {bits}, but AWQ is only supported with 4 bits: {USE_SERVED}"
        )
    scheme = PackedIntegers(
        bits=4,
        group_size=read_group_size(fields, GROUP_SIZE),
        symmetric=False,
        packing=Packing.AWQ,
    )
    ignored = read_patterns(fields, ("modules_to_not_convert",), PatternKind.MODULE)
    return Quantization(method="AWQ", rules=ignore_layers((*_list_head(fields), *ignored)), default=scheme)


def read_gptq(fields: Fields) -> Quantization:
    """Read `quant_method` gptq of AutoGPTQ and GPTQModel.

    Raises:
        ConfigError: A field is invalid or not supported.
    """
    name = fields.first_set(("checkpoint_format", "format"))
    packing = GPTQ_FORMATS.get(str(fields.values.get(name) or "gptq").lower())
    if packing is None or fields.values.get("is_marlin_format") is True:
        name = name if packing is None else "is_marlin_format"
        raise fields.unsupported(
            name,
            f"is {fields.values.get(name)!r}, weights that are repacked for other kernels: use a checkpoint "
            "with checkpoint_format gptq or gptq_v2",
        )
    scheme = _read_gptq_scheme(fields, packing)
    dynamic = fields.child("dynamic")
    rules = [*ignore_layers(_list_head(fields))]
    rules += [_read_dynamic(dynamic, pattern, fields.values, packing) for pattern in dynamic.values]
    ignored = read_patterns(fields, ("modules_to_not_convert",), PatternKind.MODULE)
    rules += ignore_layers(ignored)
    default: WeightScheme = scheme
    if listed := _list_modules(fields):
        rules += [LayerRule(LayerPattern(module, PatternKind.MODULE), scheme) for module in listed]
        default = UNQUANTIZED
    return Quantization(method="GPTQ", rules=tuple(rules), default=default)


def _list_head(fields: Fields) -> tuple[LayerPattern, ...]:
    """Return the pattern of the output head, unless a flag says that it is quantized."""
    return () if fields.flag("lm_head") else (OUTPUT_HEAD,)


def _read_gptq_scheme(fields: Fields, packing: Packing) -> PackedIntegers:
    bits, group_size = read_bits(fields), read_group_size(fields, GROUP_SIZE)
    return PackedIntegers(
        bits=bits,
        group_size=group_size,
        symmetric=fields.flag("sym", True),
        activation_order=fields.flag("desc_act") and group_size is not None,
        packing=packing,
    )


def _read_dynamic(dynamic: Fields, key: str, base: Mapping[str, Any], packing: Packing) -> LayerRule:
    """Read a rule of GPTQModel: `-:regex` for unquantized layers, `+:regex` or `regex` for other values."""
    overrides = dynamic.child(key).values
    negative = key.startswith("-:")
    pattern = parse_regex(dynamic, key, key.removeprefix("-:").removeprefix("+:"))
    if negative:
        return LayerRule(pattern, UNQUANTIZED)
    fields = Fields({**base, **overrides}, f"{dynamic.source}: {key}")
    return LayerRule(pattern, _read_gptq_scheme(fields, packing))


def _list_modules(fields: Fields) -> list[str]:
    """Read the field `MODULES`, a list of names or of lists of names; empty if it is missing."""
    value = fields.values.get(MODULES)
    if not isinstance(value, list):
        return []
    groups = [group if isinstance(group, list) else [group] for group in value]
    flat = [name for group in groups for name in group]
    return read_names(Fields({MODULES: flat}, fields.source), (MODULES,))


def read_auto_round(fields: Fields) -> Quantization:
    """Read `quant_method` auto-round, whose tensors are those of GPTQ or AWQ.

    Raises:
        ConfigError: A field is invalid, or the tensors have another format.
    """
    name = "packing_format"
    text = fields.values.get(name) or "auto_round:auto_gptq"
    packing = AUTO_ROUND_FORMATS.get(text) if isinstance(text, str) else None
    if packing is None:
        raise fields.unsupported(
            name, f"is {text!r}, which is not supported: export the model in the format auto_gptq or auto_awq"
        )
    if fields.values.get("data_type", "int") != "int":
        raise fields.error("data_type", "must be int")
    if (act_bits := fields.integer("act_bits", 16)) < 16:
        raise fields.unsupported(
            "act_bits", f"is {act_bits}: only checkpoints with unquantized inputs are supported; {USE_SERVED}"
        )
    scheme = replace(
        _read_gptq_scheme(fields, packing),
        symmetric=packing is not Packing.AWQ and fields.flag("sym", True),
        activation_order=False,
    )
    extra = fields.child("extra_config")
    rules = [_read_extra(extra, layer, scheme) for layer in extra.values]
    rules += ignore_layers(() if any(rule.pattern.matches("lm_head") for rule in rules) else (OUTPUT_HEAD,))
    ignored = read_patterns(fields, ("modules_to_not_convert",), PatternKind.MODULE)
    return Quantization(method="AutoRound", rules=(*rules, *ignore_layers(ignored)), default=scheme)


def _read_extra(extra: Fields, layer: str, scheme: PackedIntegers) -> LayerRule:
    """Read a layer's own values; 16 bits or more mean an unquantized layer."""
    fields = extra.child(layer)
    pattern = LayerPattern(layer, PatternKind.MODULE)
    bits = fields.integer("bits", scheme.bits)
    if bits >= 16:
        return LayerRule(pattern, UNQUANTIZED)
    bits = read_bits(fields, scheme.bits)
    group_size = read_group_size(fields, GROUP_SIZE, scheme.group_size or 128)
    if not any(fields.values.get(name) is not None for name in GROUP_SIZE):
        group_size = scheme.group_size
    symmetric = scheme.packing is not Packing.AWQ and fields.flag("sym", scheme.symmetric)
    return LayerRule(pattern, replace(scheme, bits=bits, group_size=group_size, symmetric=symmetric))
