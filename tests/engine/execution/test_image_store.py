# SPDX-License-Identifier: Apache-2.0
"""The store encodes the images of a plan in groups that need no more memory than the largest image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mizzen.core.images.types import ImageEncoding
from mizzen.core.step_plan import PageWrites, StepPlan, no_ints
from mizzen.engine.execution.image_store import ImageStore
from mizzen.engine.uploader import Uploader
from mizzen.parallel.collectives import SINGLE_RANK

CPU = torch.device("cpu")
Grid = tuple[int, int, int]


class PixelEncoder:
    """Encodes an image as rows that hold its first pixel, and records the sizes of groups."""

    def __init__(self) -> None:
        self.groups: list[int] = []

    def encode(self, images: Sequence[tuple[torch.Tensor, Grid]]) -> list[torch.Tensor]:
        self.groups.append(len(images))
        return [pixels[0, 0, :1].float().repeat(grid[1], 1) for pixels, grid in images]


class SecondRank:
    """Collectives of a rank that receives every image as rows of 7."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.received: list[int] = []

    def broadcast(self, buffer: torch.Tensor) -> None:
        embeddings = buffer.view(torch.float32)
        self.received.append(len(embeddings))
        embeddings.fill_(7)


def encoding(value: int, rows: int, height: int, *, pixels: bool = True) -> ImageEncoding:
    """Return an image of `height` x 4 pixels with `rows` embeddings."""
    return ImageEncoding(
        digest=bytes([value]) * 32,
        grid=(1, rows, 1),
        embeddings=rows,
        pixels=np.full((1, height, 4, 3), value, np.uint8) if pixels else None,
    )


def plan(*encodings: ImageEncoding) -> StepPlan:
    return StepPlan(step=0, decode=no_ints(), decode_version=0, pages=PageWrites(), encodings=encodings)


@pytest.mark.parametrize(
    ("max_pixels", "groups"),
    [(0, [1, 1, 1, 1, 1]), (16, [1, 1, 1, 1, 1]), (32, [2, 1, 1, 1]), (48, [2, 2, 1]), (1000, [5])],
)
def test_images_are_encoded_in_groups(max_pixels: int, groups: list[int]) -> None:
    encoder = PixelEncoder()
    store = ImageStore(torch.zeros(20, 3), encoder, Uploader(CPU), max_pixels=max_pixels)
    sizes = [(1, 3, 4), (2, 2, 4), (3, 5, 10), (4, 1, 2), (5, 4, 8)]
    store.update(plan(*(encoding(*size) for size in sizes)))
    assert encoder.groups == groups
    assert store.free_count == 5
    for value, rows, _ in sizes:
        stored = store.table[torch.from_numpy(store.rows_by_digest[bytes([value]) * 32])]
        assert torch.equal(stored, torch.full((rows, 3), float(value)))


def test_other_ranks_receive_each_image() -> None:
    ranks: Any = SecondRank()
    store = ImageStore(torch.zeros(8, 3), None, Uploader(CPU), ranks, max_pixels=100)
    store.update(plan(encoding(1, 2, 1, pixels=False), encoding(2, 4, 1, pixels=False)))
    assert ranks.received == [2, 4]
    assert int((store.table == 7).all(dim=1).sum()) == 6


def test_the_first_rank_needs_the_encoder() -> None:
    with pytest.raises(ValueError, match="needs the encoder"):
        ImageStore(torch.zeros(8, 3), None, Uploader(CPU), SINGLE_RANK)
