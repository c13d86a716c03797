# SPDX-License-Identifier: Apache-2.0
"""A model that reads images, for simulated engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers


@pytest.fixture
def vision_folder(model_folder: Path) -> Path:
    """Folder of a model with the rules of Qwen2-VL for images."""
    inner = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    inner.add_special_tokens(["<|image_pad|>"])
    (model_folder / "tokenizer.json").write_text(inner.to_str())
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
        "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
        "<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    )
    (model_folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    config = {
        "model_type": "qwen2_vl",
        "vocab_size": inner.get_vocab_size(),
        "max_position_embeddings": 2048,
        "image_token_id": inner.token_to_id("<|image_pad|>"),
        "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
    }
    (model_folder / "config.json").write_text(json.dumps(config))
    return model_folder
