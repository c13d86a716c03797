# SPDX-License-Identifier: Apache-2.0
"""Text parts of models for images, which are served as text models.

A checkpoint of such a model holds a decoder, a tower that encodes images and a projector between them. Only
the decoder is loaded. With text alone, its outputs are those of the whole model in Transformers, with one
exception: Transformers ignores `logit_scale` of Cohere 2 in the whole model, but applies it in the text
model, and Mizzen always applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mizzen.models.config import ModelConfig
from mizzen.models.families import cohere, gemma, mistral, qwen2, qwen3
from mizzen.models.hf_fields import Fields
from mizzen.models.model_families import ConfigReader
from mizzen.models.text_tensors import TextTensors
from mizzen.quantization.reader import MODELOPT_FILE, read_quantization

LLAVA_TENSORS = TextTensors(
    skipped=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    )
)
QWEN_TENSORS = TextTensors(skipped=("visual.", "model.visual."))
SHARED = ("quantization_config", MODELOPT_FILE, "tie_word_embeddings")
"""Fields of the whole model that override those of its text part."""
FALLBACKS = ("dtype", "torch_dtype", "eos_token_id")
"""Fields of the whole model that apply if its text part does not set them."""
MROPE = ("mrope_section", "mrope_interleaved")
"""Fields of a rotary embedding whose frequencies belong to three positions: time, height and width. The three
are equal for text, so that the embedding is an ordinary one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """The text part of an architecture for images."""

    readers: Mapping[str, ConfigReader]
    """Config reader of the text part by its `model_type`; the first entry is the default."""
    tensors: TextTensors
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields of the text part that checkpoints may leave out."""


TEXT_PARTS: dict[str, TextPart] = {
    "Cohere2VisionForConditionalGeneration": TextPart(
        readers={"cohere2": cohere.parse_cohere2}, tensors=LLAVA_TENSORS
    ),
    "Gemma3ForConditionalGeneration": TextPart(
        readers={"gemma3_text": gemma.parse_gemma3},
        tensors=LLAVA_TENSORS,
        defaults={"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "Mistral3ForConditionalGeneration": TextPart(
        readers={"mistral": mistral.parse_config, "ministral3": mistral.parse_ministral3},
        tensors=LLAVA_TENSORS,
    ),
    "Qwen2VLForConditionalGeneration": TextPart(
        readers={"qwen2_vl_text": qwen2.parse_config}, tensors=QWEN_TENSORS
    ),
    "Qwen2_5_VLForConditionalGeneration": TextPart(
        readers={"qwen2_5_vl_text": qwen2.parse_config}, tensors=QWEN_TENSORS
    ),
    "Qwen3VLForConditionalGeneration": TextPart(
        readers={"qwen3_vl_text": qwen3.parse_config}, tensors=QWEN_TENSORS
    ),
    "Qwen3VLMoeForConditionalGeneration": TextPart(
        readers={"qwen3_vl_moe_text": qwen3.parse_moe},
        tensors=QWEN_TENSORS,
        defaults={"norm_topk_prob": True},
    ),
}
"""Text parts that are served, by the architecture of the whole model."""


def read_text_part(fields: Fields, architecture: str) -> ModelConfig:
    """Read the configuration of the text part of an architecture in `TEXT_PARTS`.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    part = TEXT_PARTS[architecture]
    read_quantization(fields)  # its errors say more than those about other fields
    text = select_text_fields(fields)
    text = Fields({**part.defaults, **text.values}, text.source)
    kinds = tuple(part.readers)
    kind = text.values.get("model_type") if text.source != fields.source else kinds[0]
    if kind is None:
        kind = kinds[0]
    if not isinstance(kind, str) or kind not in part.readers:
        raise text.error("model_type", f"must be {' or '.join(kinds)}: no other text part is served")
    return replace(part.readers[kind](text), text_tensors=part.tensors)


def select_text_fields(fields: Fields) -> Fields:
    """Return the fields of the text part: `text_config`, or in older files those of the whole model.

    Raises:
        ConfigError: `text_config` is not an object, or neither place describes a text part.
    """
    text = fields.child("text_config")
    if not text.values:
        if fields.values.get("hidden_size") is None:
            raise fields.error("text_config", "must describe the text part of the model")
        text = fields
    values = {**text.values}
    values |= {name: fields.values[name] for name in SHARED if fields.values.get(name) is not None}
    for name in FALLBACKS:
        if values.get(name) is None and fields.values.get(name) is not None:
            values[name] = fields.values[name]
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), dict):
            values[name] = without_mrope(values[name])
    return Fields(values, text.source)


def without_mrope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a rotary embedding as they apply to text, whose three positions are equal."""
    plain = {name: value for name, value in rope.items() if name not in MROPE}
    for name in ("type", "rope_type"):
        if plain.get(name) == "mrope":
            plain[name] = "default"
    return plain
