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


def test_sizes_of_quantized_weights(tmp_path: Path) -> None:
    """Embedding, head and norms stay in bfloat16, and blocks of 128 x 128 have a scale of 4 bytes."""
    found = sizes(tmp_path, KNOWN["Qwen/Qwen3-8B-FP8"]["config"])
    linear = 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288)
    assert found["weightBytes"] == 2 * (8190735360 - linear) + linear + linear // 128**2 * 4


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3"])
def test_a_model_that_is_not_served_has_no_sizes(name: str, tmp_path: Path) -> None:
    assert sizes(tmp_path, KNOWN[name]["config"]) == {}
    assert read_sizes(tmp_path / "absent") == {}


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"architectures": ["Qwen3ForCausalLM"], "vocab_size": {}}']
)
def test_an_invalid_config_has_no_sizes(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    assert read_sizes(tmp_path) == {}
