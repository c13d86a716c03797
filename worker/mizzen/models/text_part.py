# SPDX-License-Identifier: Apache-2.0
"""Text parts of models for images.

A checkpoint of such a model holds a decoder, a tower that encodes images and a projector between them. The
decoder is loaded like a text model; `mizzen.models.vision` reads the tower, if it is served. With text alone,
the decoder's outputs are those of the whole model in Transformers, with one exception: Transformers ignores
`logit_scale` of Cohere 2 in the whole model, but applies it in the text model, and Mizzen always applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mizzen.models.config import ModelConfig
from mizzen.models.families import cohere, gemma, llama, mistral, qwen2, qwen3
from mizzen.models.hf_fields import Fields
from mizzen.models.model_families import ConfigReader
from mizzen.models.rope_config import rope_fields
from mizzen.models.text_tensors import TextTensors
from mizzen.models.vision.families import read_vision
from mizzen.quantization.reader import MODELOPT_FILE, read_quantization

LLAVA_TENSORS = TextTensors(
    skipped=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
        "image_newline",
        "model.image_newline",
    )
)
QWEN_TENSORS = TextTensors(skipped=("visual.", "model.visual."))
SHARED = ("quantization_config", MODELOPT_FILE, "tie_word_embeddings")
"""Fields of the whole model that override those of its text part."""
FALLBACKS = ("dtype", "torch_dtype", "eos_token_id")
"""Fields of the whole model that apply if its text part does not set them."""
SECTIONS, INTERLEAVED = "mrope_section", "mrope_interleaved"
MROPE = (SECTIONS, INTERLEAVED)
"""Fields of a rotary embedding whose frequencies belong to three positions: time, row and column. The three
are equal for text, so that the embedding is an ordinary one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """The text part of an architecture for images."""

    readers: Mapping[str, ConfigReader]
    """Config reader of the text part by its `model_type`; the first entry is the default."""
    tensors: TextTensors
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields of the text part that checkpoints may leave out."""
    kind_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further such values, by the `model_type` of the text part."""
    sections: tuple[int, int, int] | None = None
    """Usual numbers of frequencies of time, row and column in the rotary embedding; None for models whose
    tokens have a single position."""
    interleaves_sections: bool = False
    """Whether the frequencies of the three positions take turns."""


LLAVA_READERS: Mapping[str, ConfigReader] = {
    "llama": llama.parse_config,
    "mistral": mistral.parse_config,
    "qwen2": qwen2.parse_config,
}
LARGE = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAVA_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**LARGE, "vocab_size": 32000, "intermediate_size": 11008},
    "mistral": {
        **LARGE,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {
        **LARGE,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
}
"""Fields that the text parts of LLaVA may leave out, as Transformers fills them in."""

TEXT_PARTS: dict[str, TextPart] = {
    "Cohere2VisionForConditionalGeneration": TextPart(
        readers={"cohere2": cohere.parse_cohere2}, tensors=LLAVA_TENSORS
    ),
    "Gemma3ForConditionalGeneration": TextPart(
        readers={"gemma3_text": gemma.parse_gemma3},
        tensors=LLAVA_TENSORS,
        defaults={"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "LlavaForConditionalGeneration": TextPart(
        readers=LLAVA_READERS, tensors=LLAVA_TENSORS, kind_defaults=LLAVA_DEFAULTS
    ),
    "LlavaNextForConditionalGeneration": TextPart(
        readers=LLAVA_READERS, tensors=LLAVA_TENSORS, kind_defaults=LLAVA_DEFAULTS
    ),
    "Mistral3ForConditionalGeneration": TextPart(
        readers={"mistral": mistral.parse_config, "ministral3": mistral.parse_ministral3},
        tensors=LLAVA_TENSORS,
    ),
    "Qwen2VLForConditionalGeneration": TextPart(
        readers={"qwen2_vl_text": qwen2.parse_config}, tensors=QWEN_TENSORS, sections=(16, 24, 24)
    ),
    "Qwen2_5_VLForConditionalGeneration": TextPart(
        readers={"qwen2_5_vl_text": qwen2.parse_config}, tensors=QWEN_TENSORS, sections=(16, 24, 24)
    ),
    "Qwen3VLForConditionalGeneration": TextPart(
        readers={"qwen3_vl_text": qwen3.parse_config},
        tensors=QWEN_TENSORS,
        sections=(24, 20, 20),
        interleaves_sections=True,
    ),
    "Qwen3VLMoeForConditionalGeneration": TextPart(
        readers={"qwen3_vl_moe_text": qwen3.parse_moe},
        tensors=QWEN_TENSORS,
        defaults={"norm_topk_prob": True},
        sections=(24, 20, 20),
        interleaves_sections=True,
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
    text = Fields({**part.kind_defaults.get(kind, {}), **text.values}, text.source)
    config = replace(part.readers[kind](text), text_tensors=part.tensors, vision=read_vision(fields))
    if config.vision is not None and config.vision.output_size != config.hidden_size:
        raise fields.unsupported(
            "vision_config",
            f"describes embeddings of {config.vision.output_size} elements, but the text part has "
            f"{config.hidden_size}",
        )
    if part.sections is None:
        return config
    sections = read_sections(select_rope(fields), part.sections, config)
    ropes = tuple(
        replace(rope, sections=sections, sections_interleaved=part.interleaves_sections)
        for rope in config.ropes
    )
    return replace(config, ropes=ropes)


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


def select_rope(fields: Fields) -> Fields:
    """Return the fields of the text part's rotary embedding with those of M-RoPE, or no fields."""
    text = fields.child("text_config")
    return rope_fields(text if text.values else fields)


def read_sections(rope: Fields, default: tuple[int, int, int], config: ModelConfig) -> tuple[int, int, int]:
    """Read the numbers of frequencies that belong to time, row and column.

    Raises:
        ConfigError: they are not three positive integers whose sum is the number of frequencies.
    """
    value = rope.values.get(SECTIONS)
    sections = list(default) if value is None else value
    valid = isinstance(sections, list) and all(type(item) is int and item > 0 for item in sections)
    count = (config.rope.rotary_dim or config.head_dim) // 2
    if not valid or len(sections) != len(default) or sum(sections) != count:
        raise rope.error(SECTIONS, f"must list the numbers of {count} frequencies of time, row and column")
    time, row, column = sections
    return time, row, column


def without_mrope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a rotary embedding as they apply to text, whose three positions are equal."""
    plain = {name: value for name, value in rope.items() if name not in MROPE}
    for name in ("type", "rope_type"):
        if plain.get(name) == "mrope":
            plain[name] = "default"
    return plain
