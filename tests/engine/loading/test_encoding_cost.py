# SPDX-License-Identifier: Apache-2.0
"""Costs of encodings in prompt tokens are the ratio of operations, and bounded by the launches of kernels."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from vision_twins import TOWERS, save_vision_twin

from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.prefill_graphs import LAYER_LAUNCH_SECONDS, PREFILL_FLOPS
from mizzen.engine.loading.encoding_cost import ATTENTION_SLOWDOWN, estimate_encoding_cost
from mizzen.models.registry import read_config
from mizzen.models.vision.operations import count_encoding_operations


@pytest.mark.parametrize("twin", ["qwen2.5-vl", "qwen3-vl", "mistral3", "llava-clip"])
def test_costs_are_ratios_of_operations(twin: str, tmp_path: Path) -> None:
    save_vision_twin(tmp_path, twin, TOWERS[twin])
    config = read_config(tmp_path)
    vision = config.vision
    assert vision is not None
    size = vision.patch_size
    for tensor in (1, 2):
        options = EngineOptions(model=str(tmp_path), device="cpu", tensor=tensor)
        cost = estimate_encoding_cost(options, config, vision)
        token = 2 * config.layers * config.layer_weights / tensor
        assert cost.least == 0
        for tiles, rows, columns in [(1, 48, 60), (1, 96, 24), (2, 30, 30)]:
            operations = count_encoding_operations(vision, tiles, rows * columns)
            expected = (operations.gemms + ATTENTION_SLOWDOWN * operations.attention) / token
            pixels = np.zeros((tiles, rows * size, columns * size, 3), np.uint8)
            tokens = cost.tokens(pixels, first=True)
            assert tokens == pytest.approx(expected, abs=1.01)
            assert tokens > 50


def test_a_gpu_waits_for_the_launches_of_small_encodings(tmp_path: Path) -> None:
    save_vision_twin(tmp_path, "llava-clip", TOWERS["llava-clip"])
    config = read_config(tmp_path)
    assert config.vision is not None
    token_seconds = 2 * config.layers * config.layer_weights / PREFILL_FLOPS
    launches = config.vision.layers * LAYER_LAUNCH_SECONDS / token_seconds
    pixels = np.zeros((1, 24, 24, 3), np.uint8)
    for chunk in (1024, 64 * math.ceil(launches)):
        options = EngineOptions(model=str(tmp_path), device="cuda", prefill_chunk_tokens=chunk)
        cost = estimate_encoding_cost(options, config, config.vision)
        assert cost.least == pytest.approx(min(launches, chunk // 8), abs=1.01)
        assert cost.tokens(pixels, first=True) == cost.least > cost.tokens(pixels, first=False)
