# SPDX-License-Identifier: Apache-2.0
"""Explains by a field of config.json why a model whose architecture is unknown is not supported."""

from __future__ import annotations

from collections.abc import Callable

from mizzen.models.hf_fields import ConfigError, Fields, show_value
from mizzen.models.quantization import check_unquantized

USE_ANOTHER = "use a dense decoder of the list in docs/models.md"
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
RECURRENT = (
    "ssm_cfg",
    "state_size",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_num_heads",
    "attn_layer_period",
    "lru_width",
    "linear_num_key_heads",
    "time_step_rank",
    "rwkv_hidden_size",
    "attention_hidden_size",
)
"""Fields that only models with recurrent layers have: Mamba, gated delta nets, linear recurrences."""
RECURRENT_KINDS = ("mamba", "mamba2", "linear_attention", "recurrent", "conv", "hybrid")
"""Entries of `layer_types` and similar lists that name layers with a recurrent state."""
TOWERS = ("vision_config", "audio_config", "thinker_config", "visual")
WITH_SINKS = ("GptOssForCausalLM",)
WITHOUT_INTERFACE = (
    "BloomForCausalLM",
    "CodeGenForCausalLM",
    "FalconForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoForCausalLM",
    "MptForCausalLM",
    "StableLmForCausalLM",
)
"""Well-known decoders whose code in Transformers does not use its attention interface."""
HEADS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForRewardModel",
)
"""Ends of the names of architectures with an output head for another task than generation."""


def is_above(fields: Fields, name: str, limit: int) -> bool:
    """Return whether a field is a number above `limit`."""
    value = fields.values.get(name)
    return isinstance(value, int) and not isinstance(value, bool) and value > limit


def find_experts_field(fields: Fields) -> str:
    """Return the name of the field that counts the experts of a mixture, or an empty string."""
    return next((name for name in EXPERTS if is_above(fields, name, 1)), "")


def find_recurrent_field(fields: Fields) -> str:
    """Return the name of the field that describes recurrent layers, or an empty string."""
    for name in ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern"):
        kinds = fields.values.get(name)
        if isinstance(kinds, str) and "M" in kinds:  # Nemotron-H: one letter for each layer
            return name
        if isinstance(kinds, list) and any(kind in RECURRENT_KINDS for kind in kinds):
            return name
    return next((name for name in RECURRENT if fields.values.get(name) is not None), "")


def explain_unsupported(fields: Fields, supported: str) -> ConfigError:
    """Return the error for a model whose `architectures` are not supported.

    Args:
        fields: Fields of config.json.
        supported: Names of the supported architectures, for the message.
    """
    listed = fields.values.get("architectures")
    names = fields.strings("architectures")
    for explain in EXPLANATIONS:
        if (error := explain(fields, names)) is not None:
            return error
    if not isinstance(listed, list) or len(names) < len(listed):
        return fields.error("architectures", f"must list one of {supported}")
    return fields.unsupported(
        "architectures",
        f"{show_value(listed)} is not supported: use a model whose architectures list one of {supported}",
    )


def _explain_tower(fields: Fields, names: list[str]) -> ConfigError | None:
    tower = next((name for name in TOWERS if isinstance(fields.values.get(name), dict)), "")
    if not tower:
        return None
    return fields.unsupported(
        tower,
        f"describes a part of {_listed(names)} for images or audio, which is not supported, and the text "
        "part of this architecture is not served by itself: use a text model",
    )


def _explain_encoder(fields: Fields, names: list[str]) -> ConfigError | None:
    if fields.values.get("is_encoder_decoder") is True:
        return fields.unsupported(
            "is_encoder_decoder", f"is true: models with an encoder are not supported; {USE_ANOTHER}"
        )
    masked = [name for name in names if name.endswith("ForMaskedLM")]
    if masked:
        return fields.unsupported(
            "architectures",
            f"lists {_listed(masked)}, an encoder with a head for masked tokens, which is not supported: use "
            "an embedding model, whose architectures list a model without a head such as BertModel",
        )
    encoder = [name for name in names if name in ENCODERS]
    if encoder:
        return fields.unsupported(
            "architectures",
            f"lists {_listed(encoder)}, an encoder of a kind that is not supported: for embeddings use one "
            "of the encoders in docs/models.md, or a decoder such as Qwen3-Embedding",
        )
    return None


ENCODERS = (
    "AlbertModel",
    "DebertaV2Model",
    "DistilBertModel",
    "ElectraModel",
    "EuroBertModel",
    "JinaBertModel",
    "MPNetModel",
)
"""Well-known encoders that are not supported."""


def _explain_recurrence(fields: Fields, names: list[str]) -> ConfigError | None:
    if not (name := find_recurrent_field(fields)):
        return None
    return fields.unsupported(
        name,
        f"describes layers with a recurrent state instead of attention ({_listed(names)}), which are not "
        f"supported: {USE_ANOTHER}",
    )


def _explain_experts(fields: Fields, names: list[str]) -> ConfigError | None:
    if not (name := find_experts_field(fields)):
        return None
    return fields.unsupported(
        name,
        f"is {fields.values[name]}: mixtures of experts ({_listed(names)}) are not supported; {USE_ANOTHER}",
    )


def _explain_head(fields: Fields, names: list[str]) -> ConfigError | None:
    headed = [name for name in names if name.endswith(HEADS)]
    if not headed:
        return None
    return fields.unsupported(
        "architectures",
        f"lists {_listed(headed)}, whose output head does not generate text: use the model with a language "
        "model head (ForCausalLM)",
    )


def _explain_sinks(fields: Fields, names: list[str]) -> ConfigError | None:
    if not (found := [name for name in names if name in WITH_SINKS]):
        return None
    return fields.unsupported(
        "architectures",
        f"lists {_listed(found)}, whose layers have attention sinks, which only the native implementation "
        "supports: use --model-implementation native",
    )


def _explain_interface(fields: Fields, names: list[str]) -> ConfigError | None:
    if not (found := [name for name in names if name in WITHOUT_INTERFACE]):
        return None
    return fields.unsupported(
        "architectures",
        f"lists {_listed(found)}, whose code in Transformers does not use the attention interface: "
        f"{USE_ANOTHER}",
    )


def _explain_latent(fields: Fields, names: list[str]) -> ConfigError | None:
    if not is_above(fields, "kv_lora_rank", 0):
        return None
    return fields.unsupported(
        "kv_lora_rank",
        f"describes multi-head latent attention ({_listed(names)}), which is not supported: {USE_ANOTHER}",
    )


def _explain_quantization(fields: Fields, names: list[str]) -> ConfigError | None:
    try:
        check_unquantized(fields)
    except ConfigError as error:
        return error
    return None


def _explain_remote_code(fields: Fields, names: list[str]) -> ConfigError | None:
    code = fields.values.get("auto_map")
    if not isinstance(code, dict) or not code:
        return None
    return fields.unsupported(
        "auto_map",
        f"names Python code of the repository for {_listed(names)}, which is never executed: use a model "
        "whose architecture is in the list in docs/models.md",
    )


EXPLANATIONS: tuple[Callable[[Fields, list[str]], ConfigError | None], ...] = (
    _explain_tower,
    _explain_encoder,
    _explain_recurrence,
    _explain_experts,
    _explain_head,
    _explain_latent,
    _explain_quantization,
    _explain_sinks,
    _explain_interface,
    _explain_remote_code,
)
"""Functions that return the error if their reason applies, the most telling reason first."""


def explain_layers(fields: Fields) -> ConfigError | None:
    """Return the error for a model that cannot run through Transformers either; None if it may.

    Experts and a repository's own code are no reasons against it.
    """
    names = fields.strings("architectures")
    reasons = (explain(fields, names) for explain in EXPLANATIONS if explain not in NATIVE_ONLY)
    return next((reason for reason in reasons if reason is not None), None)


NATIVE_ONLY = (_explain_experts, _explain_remote_code)
"""Functions of `EXPLANATIONS` whose reasons apply to native implementations only."""


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "an unnamed architecture"
