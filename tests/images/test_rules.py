# SPDX-License-Identifier: Apache-2.0
"""Rules of a model's folder, digests of images, and the time that an image takes."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import CLIP, make_rules, qwen_rules

from mizzen.core.images.types import PromptImage
from mizzen.images.digest import image_digest
from mizzen.images.prompt import expand_placeholders
from mizzen.images.rotary import rotary_positions
from mizzen.images.rules import load_image_rules, read_image_rules
from mizzen.images.types import ImageRules, PixelLimits


def all_rules() -> dict[str, ImageRules]:
    rules = {name: qwen_rules(name) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")}
    return rules | {name: make_rules(name, {}, {}) for name in ("llava", "llava_next", "mistral3")}


def write_model(folder: Path, **files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "", "gemma3", "cohere2_vision"])
def test_models_without_supported_images_have_no_rules(model_type: str) -> None:
    assert read_image_rules({"model_type": model_type, "vision_config": {}}, {}, {}) is None


def test_rules_are_loaded_from_a_folder(tmp_path: Path) -> None:
    tokens = [
        {"id": 20, "content": "[IMG]"},
        {"id": 22, "content": "[IMG_BREAK]"},
        {"id": 23, "content": "[IMG_END]"},
    ]
    folder = write_model(
        tmp_path,
        config={"model_type": "mistral3", "image_token_index": 20},
        preprocessor_config={"size": {"longest_edge": 1540}},
        tokenizer={"added_tokens": tokens},
    )
    rules = load_image_rules(folder)
    assert rules is not None
    assert (rules.placeholder, rules.placeholder_id) == ("[IMG]", 20)
    assert rules.expansion(rules.geometry(28, 56)).tolist() == [20, 22, 20, 23]
    assert rules.geometry(1540, 10).width == 1540


def test_only_the_configuration_is_required(tmp_path: Path) -> None:
    rules = load_image_rules(write_model(tmp_path, config={"model_type": "qwen2_vl"}))
    assert rules == make_rules("qwen2_vl", {}, {})


@pytest.mark.parametrize("content", ["{", "[1]", "\ud800"])
def test_unreadable_files_are_named(tmp_path: Path, content: str) -> None:
    write_model(tmp_path, config={"model_type": "qwen2_vl"})
    (tmp_path / "preprocessor_config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=r"preprocessor_config\.json"):
        load_image_rules(tmp_path)


@pytest.mark.parametrize("name", all_rules())
def test_rules_survive_pickling(name: str) -> None:
    rules = all_rules()[name]
    copy = pickle.loads(pickle.dumps(rules))
    assert copy == rules
    assert copy.fingerprint() == rules.fingerprint()


def test_digests_cover_content_rules_and_geometry() -> None:
    digests = set()
    count = 0
    for rules in [*all_rules().values(), qwen_rules("qwen2_vl", image_mean=[0.5, 0.5, 0.5])]:
        limits = [None] if rules.pixel_bounds is None else [None, PixelLimits(max_pixels=100_000)]
        for limit in limits:
            for content in (b"", b"a", b"b"):
                geometry = rules.geometry(1000, 800, limit)
                digest = image_digest(content, rules, geometry)
                assert len(digest) == 32
                assert digest == image_digest(content, rules, rules.geometry(1000, 800, limit))
                digests.add(digest)
                count += 1
    assert len(digests) == count


def test_resampling_and_crops_change_the_fingerprint() -> None:
    config = {"vision_config": CLIP}
    processors: list[dict[str, Any]] = [
        {},
        {"resample": 2},
        {"do_pad": True},
        {"size": {"shortest_edge": 400}},
    ]
    assert len({make_rules("llava", config, processor).fingerprint() for processor in processors}) == 4


def test_an_image_takes_far_less_than_a_millisecond() -> None:
    rules = qwen_rules("qwen2_5_vl", max_pixels=1003520)
    ids = np.array([5] * 50 + [rules.placeholder_id] + [6] * 400, np.int32)
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        geometry = rules.geometry(1024, 1024)
        expanded, positions = expand_placeholders(ids, [geometry], rules)
        image = PromptImage(digest=bytes(32), positions=positions[0], grid=geometry.grid)
        rotary_positions([image], len(expanded), rules)
        seconds.append(time.perf_counter() - start)
        assert geometry.embeddings == 1225
    assert min(seconds) < 0.0005  # about 0.03 ms
