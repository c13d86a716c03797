"""A decoder model's configuration, read from config.json into frozen dataclasses.

Importing this module does not import torch: the supervisor reads configurations too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mizzen.models.hf_fields import Fields

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
ORIGINAL = "original_max_position_embeddings"
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) and its extension to longer contexts."""

    kind: str = "default"
    """Kind of extension: "default" (none), "linear" (positions are divided by `factor`), "dynamic" (a larger
    base for longer contexts), "llama3" (frequencies are interpolated depending on their wavelengths) or
    "yarn" (arXiv 2309.00071: frequencies are interpolated depending on how many rotations they make within
    the original context)."""
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
    """Factor by which yarn multiplies cosines and sines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder model, read from its config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    context_length: int
    """Maximum context length in tokens that the model supports."""
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Sliding window by layer: number of tokens that a token attends to, including itself; None for all."""
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether RMSNorm is applied to each head of queries and keys, before RoPE."""
    dtype: str = "bfloat16"
    """Data type in which the weights were saved."""
    end_token_ids: tuple[int, ...] = ()
    generates: bool = True
    """Whether the model can generate text. It is False for checkpoints without an output head, which only
    compute embeddings; the model of such a checkpoint is built with a tied head."""

    def with_context_length(self, length: int) -> ModelConfig:
        """Return the configuration for serving contexts of up to `length` tokens."""
        return replace(self, rope=replace(self.rope, served_context=length))


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


def read_rope(fields: Fields) -> RopeConfig:
    """Read the rotary embedding, from `rope_parameters` or the older `rope_theta` and `rope_scaling`.

    Raises:
        ConfigError: a field is missing or invalid, or the type of embedding is not supported.
    """
    rope = rope_fields(fields)
    values = rope.values
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_KINDS:
        name = "rope_type" if "rope_type" in values else "type"
        raise rope.error(name, f"must be one of {', '.join(ROPE_KINDS)}")
    for holder in (fields, rope):
        if holder.values.get("partial_rotary_factor", 1.0) != 1.0:
            raise holder.error(
                "partial_rotary_factor", "must be 1: partial rotary embedding is not supported"
            )
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = rope.number("factor")
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=factor)
    if kind == "yarn":
        return read_yarn(fields, rope, theta, factor)
    if kind == "dynamic":
        original = fields.integer("max_position_embeddings", 2048)
        return RopeConfig(kind=kind, theta=theta, factor=factor, original_context=original)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error("high_freq_factor", f"must be above low_freq_factor ({low})")
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_context=original_context(fields, rope),
    )


def read_yarn(fields: Fields, rope: Fields, theta: float, factor: float) -> RopeConfig:
    """Read yarn's parameters; `attention_factor` defaults to the value in section 3.4 of YaRN's paper.

    Raises:
        ConfigError: a field is missing or invalid.
    """

    def magnitude(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if slow >= fast:
        raise rope.error("beta_slow", f"must be below beta_fast ({fast})")
    paper_factor = magnitude()
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        paper_factor = magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_context=original_context(fields, rope, fields.integer("max_position_embeddings", 2048)),
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", paper_factor),
    )


def read_context_length(fields: Fields, rope: RopeConfig, default: int) -> int:
    """Return a model's maximum context length in tokens; yarn and dynamic extend config.json's value."""
    length = fields.integer("max_position_embeddings", default)
    if rope.kind == "dynamic":
        return max(length, int(rope.factor * length))
    if rope.kind != "yarn" or not any(ORIGINAL in holder.values for holder in (fields, rope_fields(fields))):
        return length
    return max(length, int(rope.factor * rope.original_context))


def read_windows(fields: Fields, layers: int, everywhere: int | None) -> tuple[int | None, ...]:
    """Read the sliding window of each layer in tokens; None for a layer with full attention.

    If config.json has `layer_types`, only its `sliding_attention` layers have a window; otherwise all layers
    have the window `everywhere`.

    Raises:
        ConfigError: `layer_types` or `sliding_window` is invalid.
    """
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return (everywhere,) * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error("layer_types", f"must list {layers} layers")
    if any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise fields.error("layer_types", "may contain only full_attention and sliding_attention")
    window = fields.integer("sliding_window") if "sliding_attention" in kinds else None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_heads(fields: Fields) -> tuple[int, int, int]:
    """Read the numbers of heads and KV heads, and the head dim.

    Raises:
        ConfigError: a field is missing or invalid, the number of KV heads does not divide the number of
            heads, or the head dim is not an even integer.
    """
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    hidden = fields.integer("hidden_size")
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads ({heads})")
    if fields.values.get("head_dim") is None and hidden % heads:
        raise fields.error("hidden_size", f"must be a multiple of num_attention_heads ({heads})")
    head_dim = fields.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", "must be even, for rotary embedding")
    return heads, kv_heads, head_dim


def read_token_ids(fields: Fields, name: str = "eos_token_id") -> tuple[int, ...]:
    """Read a field that holds one token id, a list of ids, or null.

    Raises:
        ConfigError: the field holds anything else.
    """
    value = fields.values.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise fields.error(name, "must be a token id or a list of token ids")
    return tuple(ids)


def quantizes_only_kv(quantization: Fields) -> bool:
    """Return whether `quantization_config` leaves the weights unquantized.

    The result is True if `quantization_config` is absent or empty, or if it describes only an 8-bit KV cache
    in the format of compressed-tensors.
    """
    values = quantization.values
    scheme = values.get("kv_cache_scheme")
    if not values:
        return True
    return values.get("config_groups") == {} and isinstance(scheme, dict) and scheme.get("num_bits") == 8


def read_decoder_config(
    fields: Fields,
    architecture: str,
    *,
    window: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    context_length: int = 2048,
    tie_embeddings: bool = False,
) -> ModelConfig:
    """Read the fields that all decoders share; the keyword arguments are specific to a family.

    `context_length` and `tie_embeddings` are the family's defaults for values that config.json does not set.
    All layers have the sliding window `window`, unless config.json lists `layer_types`.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    heads, kv_heads, head_dim = read_heads(fields)
    if fields.values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.error("hidden_act", "must be silu")
    if not fields.flag("is_causal", True):
        raise fields.error("is_causal", "must be true: attention to later tokens is not supported")
    if not quantizes_only_kv(fields.child("quantization_config")):
        raise fields.error("quantization_config", "is not supported yet: use a checkpoint without it")
    layers = fields.integer("num_hidden_layers")
    rope = read_rope(fields)
    context = read_context_length(fields, rope, context_length)
    dtype = fields.values.get("dtype") or fields.values.get("torch_dtype") or "bfloat16"
    if dtype not in DTYPES:
        raise fields.error("dtype" if "dtype" in fields.values else "torch_dtype", f"must be in {DTYPES}")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        context_length=context,
        rope=replace(rope, served_context=context),
        windows=read_windows(fields, layers, window),
        tie_embeddings=fields.flag("tie_word_embeddings", tie_embeddings),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        dtype=dtype,
        end_token_ids=read_token_ids(fields),
    )
