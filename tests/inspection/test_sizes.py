# SPDX-License-Identifier: Apache-2.0
"""Sizes that a fetch reports: a surprising config.json never makes it fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mizzen.inspection.sizes import read_sizes

KNOWN: dict[str, Any] = json.loads((Path(__file__).parent / "known_models.json").read_text())


def sizes(folder: Path, config: object) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    return read_sizes(folder)


def test_sizes_of_a_served_model(tmp_path: Path) -> None:
    assert sizes(tmp_path, KNOWN["Qwen/Qwen3-8B"]["config"]) == {
        "parameters": 8190735360,
        "dtype": "bfloat16",
    }


@pytest.mark.parametrize("name", ["openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3"])
def test_a_model_that_is_not_served_has_no_sizes(name: str, tmp_path: Path) -> None:
    assert sizes(tmp_path, KNOWN[name]["config"]) == {}
    assert read_sizes(tmp_path / "absent") == {}


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"architectures": ["Qwen3ForCausalLM"], "vocab_size": {}}']
)
def test_an_invalid_config_has_no_sizes(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    assert read_sizes(tmp_path) == {}
