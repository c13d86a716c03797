# SPDX-License-Identifier: Apache-2.0
"""Embeddings of images that are encoded in one pass or layer by layer equal those of each image alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_twins import TOWERS, save_vision_twin

from mizzen.attention.segments import BatchedSegments
from mizzen.models.vision.encoder import EncoderImage, VisionEncoder
from mizzen.models.vision.layout import PatchGrid, join_equal_segments

LoadEncoder = Callable[[Path], VisionEncoder]
SIZES = [(8, 8), (48, 72), (24, 40), (24, 40), (80, 16), (56, 88)]
"""Heights and widths of images; the third and fourth are equal, but their pixels differ."""
SETTINGS: dict[str, dict[str, Any]] = {
    "llava-next": {"image_grid_pinpoints": [[24, 48], [48, 24], [48, 48], [24, 72]]},
    "pixtral": {"vision_feature_layer": [2, -1]},
}


def make_image(twin: str, index: int) -> EncoderImage:
    """Return the pixels of an image, all black or white or random, and its grid."""
    height, width = SIZES[index]
    tiles, grid = 1, (1, height // 4, width // 4)
    if twin.startswith("llava"):
        height = width = 24
    if twin == "llava-next":
        tiles, grid = [(3, (1, 2, 6)), (5, (2, 6, 4)), (3, (2, 6, 3))][index % 3]
    generator = torch.Generator().manual_seed(index)
    pixels = torch.randint(0, 256, (tiles, height, width, 3), dtype=torch.uint8, generator=generator)
    return pixels.fill_(255 * (index == 1)) if index < 2 else pixels, grid


@pytest.mark.parametrize("twin", sorted(TOWERS))
def test_company_does_not_matter(twin: str, load_encoder: LoadEncoder, tmp_path: Path) -> None:
    tower = {**TOWERS[twin], "patch_size": 4} if twin == "llava-next" else TOWERS[twin]
    save_vision_twin(tmp_path, twin, tower, **SETTINGS.get(twin, {}))
    encoder = load_encoder(tmp_path)
    images = [make_image(twin, index) for index in range(len(SIZES))]
    with torch.inference_mode():
        alone = [encoder(*image) for image in images]
        for chosen in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 3], [3, 2, 3]):
            together = encoder.encode([images[index] for index in chosen])
            assert len(together) == len(chosen)
            for index, embeddings in zip(chosen, together, strict=True):
                scale = float(alone[index].abs().max())
                torch.testing.assert_close(embeddings, alone[index], rtol=1e-5, atol=1e-5 * scale)
        assert not torch.allclose(alone[2][:6], alone[3][:6], atol=0.01)  # pixels matter


@pytest.mark.parametrize("twin", sorted(TOWERS))
def test_layers_may_run_one_after_another(twin: str, load_encoder: LoadEncoder, tmp_path: Path) -> None:
    tower = {**TOWERS[twin], "patch_size": 4} if twin == "llava-next" else TOWERS[twin]
    save_vision_twin(tmp_path, twin, tower, **SETTINGS.get(twin, {}))
    encoder = load_encoder(tmp_path)
    image, other = make_image(twin, 2), make_image(twin, 5)
    with torch.inference_mode():
        expected = encoder(*image)
        running = encoder.begin([image])
        for end in range(1, len(encoder.blocks) + 1):
            encoder.run_layers(running, end)
            encoder(*other)  # other images do not disturb it
        [embeddings] = encoder.end(running)
    assert torch.equal(embeddings, expected)


def test_tiles_of_equal_length_are_one_batch_of_attention() -> None:
    segments = [(1, 6), (2, 6), (1, 4), (1, 4), (3, 6)]
    joined = join_equal_segments(segments)
    assert joined == ((3, 6), (2, 4), (3, 6))
    q, k, v = torch.randn(3, 44, 2, 8, generator=torch.Generator().manual_seed(0))
    apart = BatchedSegments().plan(tuple(segments))(q, k, v)
    torch.testing.assert_close(BatchedSegments().plan(joined)(q, k, v), apart)
    assert PatchGrid(3, 4, 5).patches == 60
