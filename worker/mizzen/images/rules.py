# SPDX-License-Identifier: Apache-2.0
"""Reads the rules for images from the configuration of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mizzen.images import qwen
from mizzen.images.llava import read_llava_rules
from mizzen.images.llava_next import read_llava_next_rules
from mizzen.images.pixtral import read_pixtral_rules
from mizzen.images.settings import ImageSettings
from mizzen.images.types import ImageRules


def read_image_rules(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], tokens: Mapping[str, int]
) -> ImageRules | None:
    """Read the rules for images of a model.

    Args:
        config: content of config.json.
        preprocessor: content of preprocessor_config.json; empty if the model has no such file.
        tokens: ids of the tokenizer's added tokens by text; may be empty.

    Returns:
        The rules; None if the model takes no images, or none that are supported.

    Raises:
        ValueError: a field has an invalid value; the message names the file and the field.
    """
    model = ImageSettings(config, "config.json")
    processor = ImageSettings(preprocessor, "preprocessor_config.json")
    model_type = model.text("model_type", "")
    if model_type in qwen.PATCH_SIZES:
        return qwen.read_qwen_rules(model, processor, tokens, model_type)
    if model_type == "llava":
        return read_llava_rules(model, processor, tokens) or read_pixtral_rules(model, processor, tokens, 1)
    if model_type == "llava_next":
        return read_llava_next_rules(model, processor, tokens)
    if model_type == "mistral3":
        return read_pixtral_rules(model, processor, tokens, 2)
    # Of two families that take images, only texts are served: in Gemma 3, the tokens of an image attend to
    # each other in both directions, which attention kernels lack, and Cohere 2 Vision cuts images into tiles
    # whose order and separators are not implemented.
    return None


def read_added_tokens(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of the added tokens of a tokenizer.json by text; malformed entries are left out."""
    added = tokenizer.get("added_tokens")
    return {
        token["content"]: token["id"]
        for token in (added if isinstance(added, list) else [])
        if isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int
    }


def load_image_rules(folder: Path) -> ImageRules | None:
    """Read the rules for images of the model in a folder; see `read_image_rules`.

    Raises:
        ValueError: a file cannot be read or has an invalid value.
    """
    tokens = read_added_tokens(_load_object(folder / "tokenizer.json"))
    return read_image_rules(
        _load_object(folder / "config.json"), _load_object(folder / "preprocessor_config.json"), tokens
    )


def _load_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; empty if the file does not exist."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must contain a JSON object")
    return value
