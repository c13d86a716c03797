# SPDX-License-Identifier: Apache-2.0
"""Reads the fields of config.json that the engine needs, for any architecture of Transformers.

Importing this module imports neither torch nor Transformers, because the supervisor reads configurations too.
The result is only an estimate: config.json may name a size differently, or leave it to a default of
Transformers. `inspection` replaces the estimate by the sizes that the model really has.
"""

from __future__ import annotations

from mizzen.models.config import (
    ModelConfig,
    check_causal,
    read_context_length,
    read_dtype,
    read_layer_count,
    read_token_ids,
)
from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.models.rope_config import RopeConfig, read_rope
from mizzen.models.unsupported import explain_layers, find_experts_field

HIDDEN = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
INTERMEDIATE = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
EXPERT_INTERMEDIATE = ("moe_intermediate_size", "expert_intermediate_size", *INTERMEDIATE)
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
ATTENTION_KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers that keep nothing but the keys and values of tokens."""
GENERATING = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of causal language models."""


def first_integer(fields: Fields, names: tuple[str, ...], default: int | None = None) -> int:
    """Read a positive integer from the first of the fields `names` that is set.

    Raises:
        ConfigError: none is set and there is no default, or the value is not a positive integer.
    """
    return fields.integer(fields.first_set(names), default)


def refuse_other_layers(kinds: object, source: str) -> None:
    """Check the kinds of layers; `source` names the place where they are listed.

    Raises:
        ConfigError: some layers have a state besides the KV cache.
    """
    if isinstance(kinds, list) and (others := sorted({str(kind) for kind in kinds} - set(ATTENTION_KINDS))):
        raise ConfigError(
            f"{source}: layer_types contains {', '.join(others)}, but only {' and '.join(ATTENTION_KINDS)} "
            "layers can be served, because their state is the KV cache. Use another model"
        )


def read_required(fields: Fields, names: tuple[str, ...]) -> int:
    """Read a positive integer from the first of the fields `names` that is set.

    Raises:
        ConfigError: none is set, or the value is not a positive integer.
    """
    name = fields.first_set(names)
    if fields.values.get(name) is None:
        raise fields.error(name, "is missing: add it to config.json")
    return fields.integer(name)


def read_generic_context(fields: Fields, head_dim: int) -> int:
    """Return the maximum context length in tokens, extended by the rotary embedding.

    Raises:
        ConfigError: the length is missing or not a positive integer.
    """
    length = read_required(fields, CONTEXT)
    try:
        rope = read_rope(fields, head_dim)
    except ConfigError:
        rope = RopeConfig()  # Transformers may know more kinds, and `inspection` checks them
    if fields.values.get("max_position_embeddings") is None:
        return length
    return read_context_length(fields, rope, length)


def read_expert_width(fields: Fields, hidden: int) -> int:
    """Return the width of all experts that one token runs through; 0 without a mixture of experts.

    Raises:
        ConfigError: a field is not a positive integer.
    """
    if not find_experts_field(fields):
        return 0
    width = first_integer(fields, EXPERT_INTERMEDIATE, 4 * hidden)
    return first_integer(fields, EXPERTS_PER_TOKEN, 1) * width


def read_generic_config(fields: Fields, architecture: str) -> ModelConfig:
    """Read the configuration of a model that Transformers implements.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    if (error := explain_layers(fields)) is not None:
        raise error
    check_causal(fields)
    refuse_other_layers(fields.values.get("layer_types"), fields.source)
    heads, hidden = first_integer(fields, HEADS, 1), first_integer(fields, HIDDEN, 1)
    head_dim = fields.integer("head_dim", max(1, hidden // heads))
    layers = read_layer_count(fields, fields.first_set(LAYERS), 1)
    dtype = read_dtype(fields)
    return ModelConfig(
        architecture=architecture,
        implementation="transformers",
        vocab_size=read_required(fields, ("vocab_size",)),
        hidden_size=hidden,
        intermediate_size=first_integer(fields, INTERMEDIATE, 4 * hidden),
        expert_width=read_expert_width(fields, hidden),
        layers=layers,
        heads=heads,
        kv_heads=first_integer(fields, KV_HEADS, 1 if fields.flag("multi_query") else heads),
        head_dim=head_dim,
        norm_epsilon=1e-6,
        context_length=read_generic_context(fields, head_dim),
        ropes=(),
        windows=(None,) * layers,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        dtype=dtype,
        end_token_ids=read_token_ids(fields),
    )
