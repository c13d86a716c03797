# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of the harmony format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from mizzen.gateway.harmony.markers import CALL, MARKS, RETURN
from mizzen.gateway.text.tokenizer import Tokenizer

TEMPLATE = (Path(__file__).parents[1] / "templates/harmony.jinja").read_text()


@pytest.fixture
def model(scripted: Any, tokenizer_files: dict[str, bytes]) -> Callable[..., Any]:
    """Return a function that starts an engine with a template and vocabulary like gpt-oss's.

    The engine ends its answer with the last token if that is `<|return|>` or `<|call|>`.
    """

    def start(answer: str, template: str = TEMPLATE, **behaviour: Any) -> Any:
        inner = tokenizers.Tokenizer.from_buffer(tokenizer_files["tokenizer.json"])
        inner.add_special_tokens([*MARKS])
        files = {
            "tokenizer.json": inner.to_str().encode(),
            "tokenizer_config.json": json.dumps({"chat_template": template}).encode(),
        }
        engine = scripted(files, vocab_size=inner.get_vocab_size())
        engine.tokenizer = Tokenizer(inner)
        engine.does.reply = engine.tokenizer.encode(answer, add_special_tokens=False)
        last = engine.does.reply[-1]
        engine.does.end = last if last in map(inner.token_to_id, (RETURN, CALL)) else None
        for name, value in behaviour.items():
            setattr(engine.does, name, value)
        return engine

    return start
