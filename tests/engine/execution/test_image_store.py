# SPDX-License-Identifier: Apache-2.0
"""The store encodes the images of a plan in groups that need no more memory than the largest image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from mizzen.core.images.types import ImageEncoding
from mizzen.core.step_plan import PageWrites, StepPlan, no_ints
from mizzen.engine.execution.image_store import ImageStore
from mizzen.engine.uploader import Uploader
from mizzen.parallel.collectives import SINGLE_RANK

CPU = torch.device("cpu")
Grid = tuple[int, int, int]
LAYERS = 6


class PixelEncoder:
    """Encodes an image as rows that hold its first pixel, and records the sizes of groups."""

    def __init__(self) -> None:
        self.groups: list[int] = []

    def encode(self, images: Sequence[tuple[torch.Tensor, Grid]]) -> list[torch.Tensor]:
        self.groups.append(len(images))
        return [pixels[0, 0, :1].float().repeat(grid[1], 1) for pixels, grid in images]

    def begin(self, images: Sequence[tuple[torch.Tensor, Grid]]) -> list[Any]:
        return [images, 0]

    def run_layers(self, running: list[Any], end: int) -> None:
        running[1] = end

    def end(self, running: list[Any]) -> list[torch.Tensor]:
        assert running[1] == LAYERS
        return self.encode(running[0])


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


def part(value: int, begin: int, end: int) -> StepPlan:
    """Return a plan that runs some layers of the encoder over an image with two embeddings."""
    changes = {"layers": (begin, end), "last": end == LAYERS}
    return plan(replace(encoding(value, 2, 1, pixels=not begin), **changes))


def test_layers_run_in_several_steps() -> None:
    encoder = PixelEncoder()
    store = ImageStore(torch.zeros(4, 3), encoder, Uploader(CPU), max_pixels=100)
    for begin, end in ((0, 1), (1, 4)):
        store.update(part(3, begin, end))
        assert (store.free_count, encoder.groups) == (4, [])
    store.update(part(3, 4, LAYERS))
    assert (store.free_count, encoder.groups) == (2, [1])
    assert store.running is None, "the memory of the layers is free again"
    stored = store.table[torch.from_numpy(store.rows_by_digest[bytes([3]) * 32])]
    assert torch.equal(stored, torch.full((2, 3), 3.0))


def test_another_image_displaces_the_layers_that_have_run() -> None:
    store = ImageStore(torch.zeros(8, 3), PixelEncoder(), Uploader(CPU), max_pixels=100)
    store.update(part(1, 0, 3))
    store.update(plan(encoding(2, 2, 1)))
    assert store.running is None
    with pytest.raises(ValueError, match=r"no layer of the image 01.* has run before layer 3"):
        store.update(part(1, 3, LAYERS))


def test_the_first_layers_need_pixels() -> None:
    store = ImageStore(torch.zeros(8, 3), PixelEncoder(), Uploader(CPU), max_pixels=100)
    with pytest.raises(ValueError, match="without its pixels"):
        store.update(plan(replace(encoding(1, 2, 1, pixels=False), layers=(0, 2), last=False)))


def test_other_ranks_receive_each_image() -> None:
    ranks: Any = SecondRank()
    store = ImageStore(torch.zeros(8, 3), None, Uploader(CPU), ranks, max_pixels=100)
    store.update(plan(encoding(1, 2, 1, pixels=False), encoding(2, 4, 1, pixels=False)))
    assert ranks.received == [2, 4]
    assert int((store.table == 7).all(dim=1).sum()) == 6


def test_the_first_rank_needs_the_encoder() -> None:
    with pytest.raises(ValueError, match="needs the encoder"):
        ImageStore(torch.zeros(8, 3), None, Uploader(CPU), SINGLE_RANK)
