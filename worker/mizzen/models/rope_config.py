# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of a model, read from config.json.

Importing this module does not import torch: the supervisor reads configurations too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mizzen.models.hf_fields import Fields

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) and its extension to longer contexts."""

    kind: str = "default"
    """Kind of extension: "default" (none), "linear" (positions are divided by `factor`), "dynamic" (a larger
    base for longer contexts), "llama3" (frequencies are interpolated depending on their wavelengths), "yarn"
    (arXiv 2309.00071: frequencies are interpolated depending on how many rotations they make within the
    original context) or "longrope" (arXiv 2402.13753: every frequency has its own divisor). The kind "none"
    stands for a layer without rotary embedding."""
    theta: float = 10000.0
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192
    """Context length of pre-training in tokens (dynamic, llama3, yarn)."""
    served_context: int = 0
    """Context length in tokens to which `dynamic` extends the model. It is the same for all requests, because
    requests share cached keys, which keep the rotation with which they were stored."""
    beta_fast: float = 32.0
    """Yarn does not change frequencies that make at least this many rotations in the original context."""
    beta_slow: float = 1.0
    """Yarn fully interpolates frequencies that make at most this many rotations in the original context."""
    truncate: bool = True
    """Whether yarn rounds the dimensions that belong to `beta_fast` and `beta_slow` to whole numbers."""
    attention_factor: float = 1.0
    """Factor by which yarn and longrope multiply cosines and sines."""
    long_attention_factor: float | None = None
    """Longrope's factor for contexts beyond the original one (Phi-3.5-MoE); None if it does not differ."""
    rotary_dim: int = 0
    """Number of elements of a head that are rotated, which come first; 0 for all."""
    interleaved: bool = False
    """Whether the checkpoint rotates element 2i with element 2i + 1, instead of element i with element
    i + rotary_dim / 2."""
    sections: tuple[int, int, int] = (0, 0, 0)
    """Numbers of pairs of elements that are rotated by the position in time, in height and in width (M-RoPE
    of Qwen2-VL, arXiv 2409.12191); zeros for embeddings with one position for each token."""
    sections_interleaved: bool = False
    """Whether pairs of the three positions alternate (Qwen3-VL), instead of following each other."""
    short_divisors: tuple[float, ...] = ()
    """Longrope's divisor of each frequency for contexts within the original context."""
    long_divisors: tuple[float, ...] = ()
    """Longrope's divisor of each frequency for longer contexts."""

    @property
    def has_sections(self) -> bool:
        """Whether tokens have three positions: time, height and width."""
        return any(self.sections)

    @property
    def divisors(self) -> tuple[float, ...]:
        """Longrope's divisors for the served context.

        They are the same for requests of all lengths, because requests share cached keys.
        """
        return self.long_divisors if self.served_context > self.original_context else self.short_divisors

    @property
    def served_attention_factor(self) -> float:
        """Factor of cosines and sines for the served context; see `divisors`."""
        if self.long_attention_factor is None or self.served_context <= self.original_context:
            return self.attention_factor
        return self.long_attention_factor


def rope_fields(fields: Fields) -> Fields:
    """Return the object of config.json that describes the rotary embedding; empty if there is no such object.

    Raises:
        ConfigError: `rope_parameters` and the older `rope_scaling` are both set, but differ.
    """
    rope, older = fields.child("rope_parameters"), fields.child("rope_scaling")
    if not rope.values:
        return older
    older_values = {"rope_type" if name == "type" else name: value for name, value in older.values.items()}
    if any(rope.values.get(name) != value for name, value in older_values.items()):
        raise fields.error("rope_scaling", "must agree with rope_parameters: set only rope_parameters")
    return rope


def original_context(fields: Fields, rope: Fields, default: int | None = None) -> int:
    """Read the context length of pre-training in tokens; a top-level field overrides one in `rope`."""
    return (rope if fields.values.get(ORIGINAL) is None else fields).integer(ORIGINAL, default)


def read_rope(
    fields: Fields,
    head_dim: int,
    *,
    rope: Fields | None = None,
    theta: float = 10000.0,
    rotary_fraction: float | None = None,
    interleaved: bool = False,
) -> RopeConfig:
    """Read the rotary embedding, from `rope_parameters` or the older `rope_theta` and `rope_scaling`.

    Args:
        fields: Fields of config.json.
        head_dim: Head dim of the model.
        rope: Fields of this embedding, for models whose layers differ; by default those of the whole model.
        theta: Default of `rope_theta`.
        rotary_fraction: Default of `partial_rotary_factor`; None for families that rotate whole heads.
        interleaved: Whether the checkpoint rotates neighbouring elements.

    Raises:
        ConfigError: a field is missing or invalid, or the type of embedding is not supported.
    """
    rope = rope_fields(fields) if rope is None else rope
    values = rope.values
    kind = values.get("rope_type", values.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind not in ROPE_KINDS:
        name = "rope_type" if "rope_type" in values else "type"
        raise rope.error(name, f"must be one of {', '.join(ROPE_KINDS)}")
    common = RopeConfig(
        kind=kind,
        theta=rope.number("rope_theta", fields.number("rope_theta", theta)),
        rotary_dim=read_rotary_dim(fields, rope, head_dim, rotary_fraction),
        interleaved=interleaved,
    )
    if kind == "default":
        return common
    if kind == "longrope":
        return read_longrope(fields, rope, common, head_dim)
    factor = rope.number("factor")
    common = replace(common, factor=factor)
    if kind == "linear":
        return common
    if kind == "yarn":
        return read_yarn(fields, rope, common)
    if kind == "dynamic":
        return replace(common, original_context=fields.integer("max_position_embeddings", 2048))
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error("high_freq_factor", f"must be above low_freq_factor ({low})")
    return replace(
        common,
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_context=original_context(fields, rope),
    )


def read_ropes_by_layer_type(
    fields: Fields, head_dim: int, *, full_theta: float, sliding_theta: float
) -> tuple[RopeConfig, RopeConfig] | None:
    """Read the rotary embeddings of layers with full attention and of layers with a sliding window.

    Args:
        fields: Fields of config.json.
        head_dim: Head dim of the model.
        full_theta: Default of `rope_theta` for full attention.
        sliding_theta: Default of `rope_theta` for sliding windows.

    Returns:
        Both embeddings; None if `rope_parameters` has no object for each type of layer.

    Raises:
        ConfigError: a field is missing or invalid, or the type of embedding is not supported.
    """
    rope = fields.child("rope_parameters")
    if "full_attention" not in rope.values and "sliding_attention" not in rope.values:
        return None
    return (
        read_rope(fields, head_dim, rope=rope.child("full_attention"), theta=full_theta),
        read_rope(fields, head_dim, rope=rope.child("sliding_attention"), theta=sliding_theta),
    )


def read_rotary_dim(fields: Fields, rope: Fields, head_dim: int, default: float | None) -> int:
    """Read the number of rotated elements of a head; 0 for all.

    Raises:
        ConfigError: the fraction is not between 0 and 1, or `default` is None and it is not 1.
    """
    holder = rope if "partial_rotary_factor" in rope.values else fields
    fraction = holder.number("partial_rotary_factor", 1.0 if default is None else default)
    if default is None and fraction != 1.0:
        raise holder.error("partial_rotary_factor", "must be 1: this architecture rotates whole heads")
    size = int(head_dim * fraction)
    if fraction > 1 or size < 2 or size % 2:
        raise holder.error("partial_rotary_factor", f"must select an even number of {head_dim} elements")
    return size if size < head_dim else 0


def read_longrope(fields: Fields, rope: Fields, common: RopeConfig, head_dim: int) -> RopeConfig:
    """Read longrope's divisors and its factor of cosines and sines.

    Raises:
        ConfigError: a field is missing or invalid.
    """
    count = (common.rotary_dim or head_dim) // 2

    def divisors(name: str) -> tuple[float, ...]:
        values = rope.values.get(name)
        numbers = values if isinstance(values, list) else []
        valid = all(isinstance(x, int | float) and not isinstance(x, bool) and x > 0 for x in numbers)
        if len(numbers) != count or not valid:
            raise rope.error(name, f"must list {count} positive numbers")
        return tuple(float(number) for number in numbers)

    longest = fields.integer("max_position_embeddings", 4096)
    original = original_context(fields, rope, longest)
    stretch = longest / original if fields.values.get(ORIGINAL) else rope.number("factor", longest / original)
    growth = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return replace(
        common,
        factor=stretch,
        original_context=original,
        short_divisors=divisors("short_factor"),
        long_divisors=divisors("long_factor"),
        attention_factor=rope.number("attention_factor", growth),
    )


def read_yarn(fields: Fields, rope: Fields, common: RopeConfig) -> RopeConfig:
    """Read yarn's parameters; `attention_factor` defaults to the value in section 3.4 of YaRN's paper.

    Raises:
        ConfigError: a field is missing or invalid.
    """

    def magnitude(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(common.factor) + 1 if common.factor > 1 else 1.0

    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if slow >= fast:
        raise rope.error("beta_slow", f"must be below beta_fast ({fast})")
    paper_factor = magnitude()
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        paper_factor = magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
    return replace(
        common,
        original_context=original_context(fields, rope, fields.integer("max_position_embeddings", 2048)),
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", paper_factor),
    )
