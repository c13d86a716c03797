# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mizzen.gateway.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[1] / "templates"
END = "<|im_end|>"
SPECIAL = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|start_header_id|>", "<|eot_id|>"]
COHERE = [f"<|{side}_{part}|>" for part in ("THINKING", "ACTION", "RESPONSE") for side in ("START", "END")]


@pytest.fixture(scope="module")
def small_tokenizer() -> Tokenizer:
    """Return a byte tokenizer with the markers of several families as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|eom_id|>"])
    built.add_special_tokens(["<|tool_call|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|assistant|>"])
    built.add_tokens(["<tool_call>", "</tool_call>"])
    return Tokenizer(built)


@pytest.fixture
def model(scripted: Any, tokenizer_files: dict[str, bytes]) -> Callable[..., Any]:
    """Return a function that starts an engine with one of the chat templates and a fixed answer."""

    def start(template: str | None, answer: str, **template_config: Any) -> Any:
        inner = tokenizers.Tokenizer.from_buffer(tokenizer_files["tokenizer.json"])
        is_cohere = "START_ACTION" in template_config.get("chat_template", "")
        inner.add_special_tokens([*SPECIAL, *(COHERE if is_cohere else ())])
        inner.add_tokens(["<tool_call>", "</tool_call>"])
        if template in ("qwen3", None):
            inner.add_tokens(["<think>", "</think>"])
        config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
        if template not in (None, "bare"):
            config["chat_template"] = (FOLDER / f"{template}.jinja").read_text()
        files = {
            "tokenizer.json": inner.to_str().encode(),
            "tokenizer_config.json": json.dumps({**config, **template_config}).encode(),
        }
        engine = scripted(files, vocab_size=inner.get_vocab_size())
        tokenizer = Tokenizer(inner)
        engine.tokenizer = tokenizer
        end = tokenizer.token_id(END)
        engine.does.reply = [*tokenizer.encode(answer, add_special_tokens=False), end]
        engine.does.end = end
        return engine

    return start
