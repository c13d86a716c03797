# SPDX-License-Identifier: Apache-2.0
"""Models that read images, for scripted engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from image_part_kit import QWEN_CONFIG, QWEN_PREPROCESSOR
from mizzen.gateway.text.model import TextModel, build_text_model

TEMPLATES = Path(__file__).parent


def add_tokens(files: dict[str, bytes], *names: str) -> tokenizers.Tokenizer:
    """Return the tokenizer of a model with more special tokens."""
    inner = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    inner.add_special_tokens(list(names))
    return inner


@pytest.fixture(scope="session")
def qwen_files(tokenizer_files: dict[str, bytes]) -> dict[str, bytes]:
    """Files of a model like Qwen2.5-VL."""
    inner = add_tokens(
        tokenizer_files, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
    )
    config = {**QWEN_CONFIG, "image_token_id": inner.token_to_id("<|image_pad|>")}
    return {
        "tokenizer.json": inner.to_str().encode(),
        "tokenizer_config.json": b"{}",
        "chat_template.json": json.dumps(
            {"chat_template": (TEMPLATES / "qwen25vl.jinja").read_text()}
        ).encode(),
        "config.json": json.dumps(config).encode(),
        "preprocessor_config.json": json.dumps(QWEN_PREPROCESSOR).encode(),
    }


@pytest.fixture(scope="session")
def llava_files(tokenizer_files: dict[str, bytes]) -> Callable[[str], dict[str, bytes]]:
    """Return a function that returns the files of a model like LLaVA 1.5 with a chat template."""

    def make(template: str) -> dict[str, bytes]:
        inner = add_tokens(tokenizer_files, "<image>")
        vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
        config = {
            "model_type": "llava",
            "image_token_index": inner.token_to_id("<image>"),
            "vision_config": vision,
        }
        square = {"height": 28, "width": 28}
        preprocessor = {"size": {"shortest_edge": 28}, "crop_size": square}
        return {
            "tokenizer.json": inner.to_str().encode(),
            "tokenizer_config.json": json.dumps({"chat_template": template}).encode(),
            "config.json": json.dumps(config).encode(),
            "preprocessor_config.json": json.dumps(preprocessor).encode(),
        }

    return make


@pytest.fixture(scope="session")
def qwen(qwen_files: dict[str, bytes]) -> TextModel:
    return build_text_model("qwen", qwen_files)


@pytest.fixture
def qwen_engine(scripted: Any, qwen_files: dict[str, bytes]) -> Any:
    """A scripted engine with a model like Qwen2.5-VL."""
    return scripted(qwen_files, images=True)
