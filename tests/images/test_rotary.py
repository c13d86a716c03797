# SPDX-License-Identifier: Apache-2.0
"""Rotary positions are those of Transformers, and those of the formula in the paper of Qwen2-VL."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_files import qwen_rules
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from mizzen.core.images.types import PromptImage
from mizzen.core.request import Int32
from mizzen.images.prompt import expand_placeholders
from mizzen.images.rotary import rotary_positions
from mizzen.images.types import ImageGeometry, InvalidImage

MODELS: dict[str, Any] = {"qwen2_vl": Qwen2VLModel, "qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}
PAD = 151655


def random_prompt(
    model_type: str, source: random.Random
) -> tuple[Int32, list[ImageGeometry], tuple[Int32, ...]]:
    """Return a prompt with up to four images between texts, their geometries, and positions of embeddings."""
    rules = qwen_rules(model_type)
    ids: list[int] = [5] * source.randint(0, 8)
    geometries = []
    for _ in range(source.randint(1, 4)):
        ids += [6, PAD, *[7] * source.randint(1, 9)]
        geometries.append(rules.geometry(source.randint(20, 900), source.randint(20, 900)))
    expanded, positions = expand_placeholders(np.array(ids, np.int32), geometries, rules)
    return expanded, geometries, positions


def prompt_images(geometries: list[ImageGeometry], positions: tuple[Int32, ...]) -> list[PromptImage]:
    return [
        PromptImage(digest=bytes(32), positions=indices, grid=geometry.grid)
        for geometry, indices in zip(geometries, positions, strict=True)
    ]


def transformers_positions(
    model_type: str, ids: Int32, geometries: list[ImageGeometry]
) -> tuple[np.ndarray, int]:
    """Return positions [3, n] and the difference between position and index after the prompt."""
    model = MODELS[model_type]
    stub = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=4))
    )
    stub.get_vision_position_ids = lambda *args, **names: model.get_vision_position_ids(stub, *args, **names)
    tokens = torch.tensor(ids, dtype=torch.long)[None]
    found, deltas = model.get_rope_index(
        stub,
        input_ids=tokens,
        mm_token_type_ids=(tokens == PAD).int(),
        image_grid_thw=torch.tensor([geometry.grid for geometry in geometries]),
    )
    return found[:, 0].numpy(), int(deltas[0, 0])


def paper_positions(ids: Int32, geometries: list[ImageGeometry]) -> list[tuple[int, int, int]]:
    """Return the position of each token by section 2.1 of arXiv 2409.12191, token by token.

    Texts have equal components. Within an image the temporal component is constant, and the others are the
    row and the column. Each modality begins one after the largest component of the previous one.
    """
    found: list[tuple[int, int, int]] = []
    images = iter(geometries)
    index = 0
    while index < len(ids):
        start = 1 + max((max(position) for position in found), default=-1)
        if ids[index] != PAD:
            found.append((start, start, start))
            index += 1
            continue
        _, height, width = next(images).grid
        for row in range(height // 2):
            found += [(start, start + row, start + column) for column in range(width // 2)]
        index += height * width // 4
    return found


@pytest.mark.parametrize("model_type", MODELS)
def test_positions_are_those_of_transformers(model_type: str) -> None:
    source = random.Random(7)
    for _ in range(40):
        ids, geometries, positions = random_prompt(model_type, source)
        result = rotary_positions(prompt_images(geometries, positions), len(ids), qwen_rules(model_type))
        assert result is not None
        expected, delta = transformers_positions(model_type, ids, geometries)
        end = result.positions.shape[1]
        assert end == positions[-1][-1] + 1
        np.testing.assert_array_equal(result.positions, expected[:, :end])
        np.testing.assert_array_equal(np.arange(end, len(ids)) + result.offset, expected[0, end:])
        assert result.offset == delta


def test_positions_are_those_of_the_paper() -> None:
    source = random.Random(8)
    for _ in range(15):
        ids, geometries, positions = random_prompt("qwen2_vl", source)
        result = rotary_positions(prompt_images(geometries, positions), len(ids), qwen_rules("qwen2_vl"))
        assert result is not None
        rest = np.arange(result.positions.shape[1], len(ids), dtype=np.int32) + result.offset
        whole = np.concatenate([result.positions, np.broadcast_to(rest, (3, len(rest)))], axis=1)
        assert [tuple(column) for column in whole.T.tolist()] == paper_positions(ids, geometries)


def test_an_image_may_begin_and_end_the_prompt() -> None:
    rules = qwen_rules("qwen2_vl")
    geometry = rules.geometry(56, 84)
    ids, positions = expand_placeholders(np.array([PAD], np.int32), [geometry], rules)
    result = rotary_positions(prompt_images([geometry], positions), len(ids), rules)
    assert result is not None
    assert result.positions.tolist() == [[0] * 6, [0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 0, 1]]
    assert result.offset == 3 - 6


def test_prompts_without_images_have_no_rotary_positions() -> None:
    assert rotary_positions([], 5, qwen_rules("qwen2_vl")) is None


def test_images_that_do_not_fit_their_grids_are_refused() -> None:
    image = PromptImage(digest=bytes(32), positions=np.arange(5, dtype=np.int32), grid=(1, 4, 4))
    with pytest.raises(ValueError, match="does not have 4 tokens"):
        rotary_positions([image], 9, qwen_rules("qwen2_vl"))


@pytest.mark.parametrize("count", [0, 2])
def test_the_number_of_placeholders_must_be_that_of_images(count: int) -> None:
    rules = qwen_rules("qwen2_vl")
    ids = np.array([1, *[PAD] * count, 2], np.int32)
    with pytest.raises(InvalidImage, match=f"{count} placeholders .*image_pad.* for 1 images"):
        expand_placeholders(ids, [rules.geometry(100, 100)], rules)


def test_prompts_without_images_stay_the_same() -> None:
    ids = np.array([1, 2, 3], np.int32)
    expanded, positions = expand_placeholders(ids, [], qwen_rules("qwen2_vl"))
    assert expanded.tolist() == [1, 2, 3]
    assert positions == ()
