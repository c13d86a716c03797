# SPDX-License-Identifier: Apache-2.0
"""Fields that several quantization methods share: lists of layers, group sizes, the KV cache."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mizzen.models.hf_fields import Fields
from mizzen.quantization.layer_patterns import (
    MAX_PATTERN_LENGTH,
    MAX_PATTERNS,
    LayerPattern,
    PatternKind,
    compile_pattern,
)
from mizzen.quantization.schemes import KvScales, KvScheme

REGEX_PREFIX = "re:"
OUTPUT_HEAD = LayerPattern("lm_head", PatternKind.MODULE)
USE_SERVED = "use a checkpoint of the model in bfloat16 or float16"
"""Way out for formats that are not supported."""
USE_ORIGINAL = "use the checkpoint in bfloat16 or float16 from which they were made"
"""Way out for quantized weights that are not supported."""


def read_names(fields: Fields, names: Sequence[str]) -> list[str]:
    """Read a list of names; the field is the first of `names` that is set, and may be null.

    Raises:
        ConfigError: The field is not a list of strings, or too long.
    """
    name = fields.first_set(names)
    value = fields.values.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise fields.error(name, "must be a list of names")
    if len(value) > MAX_PATTERNS or any(len(item) > MAX_PATTERN_LENGTH for item in value):
        raise fields.unsupported(
            name, f"must have at most {MAX_PATTERNS} names of at most {MAX_PATTERN_LENGTH} characters"
        )
    return value


def read_patterns(fields: Fields, names: Sequence[str], kind: PatternKind) -> tuple[LayerPattern, ...]:
    """Read a list of patterns of one kind; the field is the first of `names` that is set, and may be null.

    Raises:
        ConfigError: The field is not a list of strings.
    """
    return tuple(LayerPattern(text, kind) for text in read_names(fields, names))


def parse_target(fields: Fields, field: str, text: str) -> LayerPattern:
    """Return the pattern of compressed-tensors: the name of a layer, or a regular expression after `re:`.

    Raises:
        ConfigError: The regular expression is invalid.
    """
    if not text.startswith(REGEX_PREFIX):
        return LayerPattern(text, PatternKind.NAME)
    return parse_regex(fields, field, text.removeprefix(REGEX_PREFIX))


def parse_regex(fields: Fields, field: str, text: str) -> LayerPattern:
    """Return the pattern of a regular expression.

    Raises:
        ConfigError: It is invalid.
    """
    try:
        compile_pattern(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise fields.unsupported(field, f"has the invalid regular expression {text!r}: {error}") from error
    return LayerPattern(text, PatternKind.REGEX)


def read_group_size(fields: Fields, names: Sequence[str], default: int = 128) -> int | None:
    """Read a group size; None means one group for each row (-1).

    Raises:
        ConfigError: It is neither -1 nor a positive integer.
    """
    name = fields.first_set(names)
    return None if fields.values.get(name) == -1 else fields.integer(name, default)


def read_block(fields: Fields, name: str) -> tuple[int, int] | None:
    """Read the rows and columns of a block; None if the field is missing or null.

    Raises:
        ConfigError: It is not a list of two positive integers.
    """
    match fields.values.get(name):
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case _:
            raise fields.error(name, "must list the rows and columns of a block")


def read_kv_scheme(fields: Fields) -> KvScheme | None:
    """Read `kv_cache_scheme`, as compressed-tensors, ModelOpt and AutoFP8 write it.

    Raises:
        ConfigError: It describes another KV cache than one with 8-bit floating-point numbers.
    """
    value = fields.values.get("kv_cache_scheme")
    if isinstance(value, str):  # AutoFP8: "static"
        return KvScheme()
    scheme = fields.child("kv_cache_scheme")
    if not value:
        return None
    if scheme.integer("num_bits", 8) != 8 or scheme.values.get("type", "float") != "float":
        raise scheme.unsupported("num_bits", "must be 8, and type float: no other KV cache is supported")
    if scheme.flag("dynamic"):
        raise scheme.unsupported("dynamic", "must be false: scales of a KV cache are not computed")
    strategy = scheme.values.get("strategy", "tensor")
    if strategy not in ("tensor", "attn_head"):
        raise scheme.error("strategy", "must be tensor or attn_head")
    return KvScheme(scales=KvScales.LAYER if strategy == "tensor" else KvScales.HEAD)
