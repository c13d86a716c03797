# SPDX-License-Identifier: Apache-2.0
"""Fixture for tests of the Responses API."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from mizzen.gateway.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[1] / "templates"
END = "<|im_end|>"


@pytest.fixture
def model(scripted: Any, tokenizer_files: dict[str, bytes]) -> Callable[..., Any]:
    """Return a function that starts an engine with a fixed answer."""

    def start(answer: str, **behaviour: Any) -> Any:
        inner = tokenizers.Tokenizer.from_buffer(tokenizer_files["tokenizer.json"])
        inner.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
        config = {"chat_template": (FOLDER / "qwen3.jinja").read_text()}
        files = {
            "tokenizer.json": inner.to_str().encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
        }
        engine = scripted(files, vocab_size=inner.get_vocab_size())
        engine.tokenizer = Tokenizer(inner)
        end = engine.tokenizer.token_id(END)
        engine.does.reply = [*engine.tokenizer.encode(answer, add_special_tokens=False), end]
        engine.does.end = end
        for name, value in behaviour.items():
            setattr(engine.does, name, value)
        return engine

    return start
