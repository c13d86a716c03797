# SPDX-License-Identifier: Apache-2.0
"""Normalised pixels and patches are exactly those of Transformers' processors; windows cover each block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.vision_utils import get_vision_position_ids

from mizzen.models.hf_fields import Fields
from mizzen.models.vision.config import Normalisation
from mizzen.models.vision.patches import PixelNormaliser, cut_patches, patch_positions
from mizzen.models.vision.qwen import read_qwen3
from mizzen.models.vision.windows import order_by_window

CPU = torch.device("cpu")


def test_all_values_are_normalised_exactly() -> None:
    values = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    for mean, std in [((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), ((0.48, 0.457, 0.4), (0.26, 0.261, 0.275))]:
        processor = SiglipImageProcessorPil(do_resize=False, image_mean=list(mean), image_std=list(std))
        expected = processor(Image.fromarray(values), return_tensors="pt")["pixel_values"][0]
        normalise = PixelNormaliser(Normalisation(mean=mean, std=std), CPU)
        pixels = normalise(torch.from_numpy(values))
        assert pixels.dtype == torch.float32
        assert torch.equal(pixels.permute(2, 0, 1), expected)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 96), (160, 32)])
def test_patches_are_those_of_the_processor(height: int, width: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    inputs = Qwen2VLImageProcessorPil(patch_size=16, do_resize=False)(
        Image.fromarray(pixels), return_tensors="pt"
    )
    config = read_qwen3(Fields({}))
    normalise = PixelNormaliser(config.normalisation, CPU)
    patches = cut_patches(normalise(torch.from_numpy(pixels)[None]), config)
    assert torch.equal(patches, inputs["pixel_values"])
    positions = patch_positions(height // 16, width // 16, 2, CPU)
    assert torch.equal(positions, get_vision_position_ids(inputs["image_grid_thw"], 2))


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("columns", [1, 4, 6, 9])
def test_windows_hold_the_blocks_of_one_square(rows: int, columns: int) -> None:
    window = 4
    order, segments = order_by_window(rows, columns, window, merge=2, device=CPU)
    assert sorted(order.tolist()) == list(range(rows * columns))
    assert len(segments) <= 4
    windows: list[set[tuple[int, int]]] = []
    start = 0
    for count, patches in segments:
        for _ in range(count):
            blocks = order[start : start + patches // 4].tolist()
            windows.append({(block // columns // window, block % columns // window) for block in blocks})
            start += patches // 4
    assert start == rows * columns
    assert all(len(squares) == 1 for squares in windows)
    assert len({next(iter(squares)) for squares in windows}) == len(windows)
