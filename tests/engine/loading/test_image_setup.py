# SPDX-License-Identifier: Apache-2.0
"""The largest image, the size of the store and the memory of images, and options without images."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_runs import make
from image_prompts import read_rules, save_image_twin
from vision_twins import save_vision_twin

from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.image_setup import ImageMemory
from mizzen.engine.loading.memory_need import MemoryNeed
from mizzen.engine.loading.served_images import (
    ServedImages,
    estimate_encoding_bytes,
    find_largest_image,
    read_served_images,
)
from mizzen.images.types import ImageGeometry, InvalidImage
from mizzen.models.registry import read_config


def served(folder: Path, context: int = 200, **options: Any) -> ServedImages | None:
    config = read_config(folder)
    return read_served_images(EngineOptions(model=str(folder), **options), config, context)


@pytest.mark.parametrize("most", [1, 7, 30, 64, 10_000])
def test_no_image_that_fits_is_larger(most: int, tmp_path: Path) -> None:
    save_image_twin(tmp_path, "qwen2.5-vl")
    rules = read_rules(tmp_path)
    largest = find_largest_image(rules, most)
    assert largest is not None
    random = np.random.default_rng(0)
    for width, height in random.integers(1, 300, (2000, 2)).tolist():
        try:
            other = rules.geometry(width, height)
        except InvalidImage:
            continue
        assert other.embeddings > most or other.embeddings <= largest.embeddings <= most


def test_the_store_has_room_for_two_images_and_four_steps(tmp_path: Path) -> None:
    save_image_twin(tmp_path, "qwen3-vl")
    for chunk, capacity in ((8, 2 * 50), (30, 120)):
        images = served(tmp_path, 51, prefill_chunk_tokens=chunk)
        assert images is not None
        assert images.largest.embeddings == 50
        assert (images.capacity, images.width) == (capacity, 3 * 32)
    images = served(tmp_path, 51, image_cache_tokens=70)
    assert images is not None
    assert images.capacity == 70
    with pytest.raises(ValueError, match="--image-cache-tokens 49 is less than the 50 embeddings"):
        served(tmp_path, 51, image_cache_tokens=49)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 640, "max_pixels": 640}))
    with pytest.raises(ValueError, match="no image fits into a context of 4 tokens: raise --context-length"):
        served(tmp_path, 4)


def test_the_decoder_needs_more_layers_than_the_encoder_has_features(tmp_path: Path) -> None:
    save_vision_twin(tmp_path, "qwen3-vl", make_tower([0, 1, 2]), image_token_id=7, video_token_id=158)
    with pytest.raises(ValueError, match=r"features for 3 layers.*use --images off"):
        served(tmp_path)


def make_tower(stages: list[int]) -> dict[str, Any]:
    """Return the fields of a tower with features for a decoder's layers."""
    return {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": stages,
        "num_position_embeddings": 16,
    }


def test_images_may_be_off(kit: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_image_twin(tmp_path, "qwen2.5-vl")
    caplog.set_level(logging.WARNING)
    engine = make(tmp_path, images="off")
    assert not engine.info.images
    assert "only the text part of the model is served: images are rejected" in caplog.text
    text_bytes = engine.info.weights_bytes
    engine.close()
    engine = make(tmp_path)
    assert engine.info.images
    assert engine.info.weights_bytes > text_bytes
    engine.close()
    kit.save_model(tmp_path / "text", "qwen3")
    assert served(tmp_path / "text") is None


def test_memory_of_images_is_added_to_that_of_a_step(kit: SimpleNamespace, tmp_path: Path) -> None:
    save_image_twin(tmp_path, "qwen3-vl")
    options = EngineOptions(model=str(tmp_path), device="cpu", prefill_chunk_tokens=8)
    images = served(tmp_path, prefill_chunk_tokens=8)
    assert images is not None
    model = kit.Bench(tmp_path).model
    memory = ImageMemory(options, images, model, None)
    need = memory.add_to(MemoryNeed(token_bytes=1, step_bytes=1000), options)
    rows = 4 * images.width * (images.capacity + 8)
    encoding = estimate_encoding_bytes(images.vision, images.largest, 4)
    assert need.step_bytes == 1000 + rows + encoding
    group: Any = SimpleNamespace(rank=1, collectives=SimpleNamespace(rank=1))
    follower = ImageMemory(options, images, model, group)
    assert follower.encoder is None
    assert not follower.format_bytes
    need = follower.add_to(MemoryNeed(token_bytes=1, step_bytes=1000), options)
    assert need.step_bytes == 1000 + rows + 4 * images.width * images.largest.embeddings


def test_the_estimate_covers_the_activations_of_an_encoding(tmp_path: Path) -> None:
    """Compare with the tensors that are alive at once in the encoder's layers."""
    save_image_twin(tmp_path, "qwen2.5-vl")
    images = served(tmp_path)
    assert images is not None
    vision = images.vision
    image = ImageGeometry(tiles=1, height=64, width=64, grid=(1, 16, 16), embeddings=64)
    patches = 256
    residual_and_qkv = patches * 5 * vision.hidden_size * 4
    rotated = patches * 2 * vision.hidden_size * 4
    pixels = 64 * 64 * 3 * 4
    assert estimate_encoding_bytes(vision, image, 4) >= residual_and_qkv + rotated + pixels
