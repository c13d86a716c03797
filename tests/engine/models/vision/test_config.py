# SPDX-License-Identifier: Apache-2.0
"""Configurations of vision encoders, read from config.json and preprocessor_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_twins import TOWERS, VISION_TWINS, save_vision_twin

from mizzen.layers.context import BuildContext
from mizzen.models.hf_fields import ConfigError
from mizzen.models.registry import read_config
from mizzen.models.vision.config import Normalisation
from mizzen.models.vision.encoder import make_vision_encoder
from mizzen.models.vision.fields import CLIP_NORMALISATION
from mizzen.models.vision.parameters import count_vision_parameters

META = BuildContext(device=torch.device("meta"), dtype=torch.bfloat16)


def change_config(folder: Path, part: str, **changes: Any) -> None:
    """Change fields of the object `part` of config.json, or of the whole file for an empty name."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    (fields[part] if part else fields).update(changes)
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize("twin", TOWERS)
def test_parameters_are_those_of_all_tensors(twin: str, tmp_path: Path) -> None:
    save_vision_twin(tmp_path, twin, TOWERS[twin])
    config = read_config(tmp_path).vision
    assert config is not None
    targets = make_vision_encoder(META, config).targets()
    assert count_vision_parameters(config) == sum(target.destination.numel() for target in targets)


@pytest.mark.parametrize("twin", ["cohere2-vision", "gemma3"])
def test_towers_of_other_families_are_not_served(twin: str, tmp_path: Path) -> None:
    save_vision_twin(tmp_path, twin)
    assert read_config(tmp_path).vision is None


def test_a_tower_of_another_type_is_not_served(tmp_path: Path) -> None:
    save_vision_twin(tmp_path, "llava-clip")
    change_config(tmp_path, "vision_config", model_type="dinov2")
    config = read_config(tmp_path)
    assert config.vision is None
    assert config.text_tensors is not None


def test_every_twin_of_a_served_family_has_a_tower(tmp_path: Path) -> None:
    assert VISION_TWINS.keys() - {"cohere2-vision", "gemma3", "ministral3"} == TOWERS.keys()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            {},
            CLIP_NORMALISATION,
        ),
        (
            {"image_mean": [0.1, 0.2, 0.3], "image_std": 0.25, "rescale_factor": 0.5},
            Normalisation(mean=(0.1, 0.2, 0.3), std=(0.25, 0.25, 0.25), rescale=0.5),
        ),
        (
            {"do_normalize": False, "do_rescale": False, "image_mean": [9, 9, 9]},
            Normalisation(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), rescale=1.0),
        ),
    ],
)
def test_the_normalisation_is_that_of_the_preprocessor(
    content: dict[str, Any], expected: Normalisation, tmp_path: Path
) -> None:
    save_vision_twin(tmp_path, "qwen3-vl")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    vision = read_config(tmp_path).vision
    assert vision is not None
    assert vision.normalisation == expected


def test_the_rotary_embedding_has_sections(tmp_path: Path) -> None:
    save_vision_twin(tmp_path, "qwen3-vl")
    rope = read_config(tmp_path).rope
    assert (rope.sections, rope.sections_interleaved) == ((2, 1, 1), True)
    save_vision_twin(tmp_path, "qwen2.5-vl")
    rope = read_config(tmp_path).rope
    assert (rope.sections, rope.sections_interleaved) == ((1, 1, 2), False)
    save_vision_twin(tmp_path, "llava-clip")
    assert not read_config(tmp_path).rope.has_sections


@pytest.mark.parametrize(
    ("twin", "part", "changes", "message"),
    [
        (
            "qwen2.5-vl",
            "vision_config",
            {"num_heads": 5},
            r"must be a multiple of 4 \* num_heads",
        ),
        ("qwen2.5-vl", "vision_config", {"fullatt_block_indexes": [4]}, "fullatt_block_indexes must list"),
        ("qwen2.5-vl", "vision_config", {"window_size": 4}, "window_size must be at least"),
        ("qwen2.5-vl", "vision_config", {"hidden_act": "tanh"}, "hidden_act must be one of"),
        ("qwen2.5-vl", "vision_config", {"in_channels": 1}, "in_channels must be 3"),
        ("qwen2.5-vl", "vision_config", {"depth": 10**9}, "depth must be at most"),
        ("qwen2.5-vl", "vision_config", {"patch_size": [4, 8]}, "patch_size must be a positive integer"),
        ("qwen2.5-vl", "vision_config", {"out_hidden_size": 8}, "describes embeddings of 8 elements"),
        ("qwen3-vl", "vision_config", {"num_position_embeddings": 50}, "must be a square number"),
        ("qwen3-vl", "vision_config", {"deepstack_visual_indexes": [1, 1]}, "must list different layers"),
        ("llava-clip", "", {"vision_feature_layer": 9}, "vision_feature_layer must be a layer from -5 to 4"),
        ("llava-clip", "", {"vision_feature_select_strategy": "cls"}, "must be default or full"),
        ("llava-clip", "vision_config", {"image_size": 4}, "image_size must be at least patch_size"),
        ("mistral3", "", {"vision_feature_layer": [1, 2]}, "vision_feature_layer must be a single layer"),
        ("pixtral", "vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be axial"),
    ],
)
def test_errors_name_the_field(
    twin: str, part: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_vision_twin(tmp_path, twin, TOWERS[twin])
    change_config(tmp_path, part, **changes)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"image_mean": [0.5, 0.5]}, "image_mean must list 3 numbers"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std must have only positive numbers"),
        ({"rescale_factor": -1}, "rescale_factor must be a positive number"),
    ],
)
def test_errors_name_the_field_of_the_preprocessor(
    content: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_vision_twin(tmp_path, "qwen3-vl")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)
