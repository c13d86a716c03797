# SPDX-License-Identifier: Apache-2.0
"""Encodings take a share of a step's budget that corresponds to their work."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from mizzen.core.config import SchedulerConfig
from mizzen.core.events import AddRequest, ProvideImage
from mizzen.core.images.cost import EncodingCost
from mizzen.core.images.types import PromptImage
from mizzen.core.request import Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import StepPlan

EMBEDDINGS = 4


def pixels(tiles: int, height: int, width: int) -> np.ndarray:
    return np.zeros((tiles, height, width, 3), np.uint8)


def test_cost_grows_with_patches_and_with_their_pairs() -> None:
    cost = EncodingCost(patch_size=4, patch_tokens=0.5, pair_tokens=0.01, least=9)
    assert cost.tokens(pixels(1, 40, 40), first=False) == 50 + 100
    assert cost.tokens(pixels(3, 40, 40), first=True) == 3 * (50 + 100)
    assert cost.tokens(pixels(1, 8, 8), first=True) == 9
    assert cost.tokens(pixels(1, 8, 8), first=False) == 3
    assert cost.tokens(pixels(1, 4, 4), first=False) == 1


def schedule(cost: EncodingCost | None, images: int, edge: int) -> StepPlan:
    """Return the step of a prompt that consists of images of `edge` x `edge` pixels, and then of text."""
    scheduler = Scheduler(
        SchedulerConfig(
            pages_total=128,
            context_length=400,
            page_size=4,
            image_capacity=100,
            prefill_chunk_tokens=200,
            encoding_cost=cost,
        )
    )
    digests = [hashlib.sha256(bytes([number])).digest() for number in range(images)]
    request = Request(
        rid=1,
        prompt=np.full(images * EMBEDDINGS + 250, 9, np.int32),
        sampling=SamplingParams(max_tokens=1),
        images=tuple(
            PromptImage(
                digest=digest,
                positions=np.arange(EMBEDDINGS, dtype=np.int32) + number * EMBEDDINGS,
                grid=(1, 2, 2),
            )
            for number, digest in enumerate(digests)
        ),
    )
    scheduler.schedule([AddRequest(request)], 0.0)
    plan = scheduler.schedule([ProvideImage(digest, pixels(1, edge, edge)) for digest in digests], 1.0)
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("cost", "images", "edge", "encoded", "tokens"),
    [
        (None, 3, 20, 3, 200 - 3 * EMBEDDINGS),
        # 25 patches: 10 tokens each.
        (EncodingCost(patch_size=4, patch_tokens=0.4, pair_tokens=0), 3, 20, 3, 170),
        (EncodingCost(patch_size=4, patch_tokens=0, pair_tokens=0.016), 3, 20, 3, 170),
        # The first costs 30, because its kernels must be launched.
        (EncodingCost(patch_size=4, patch_tokens=0.4, pair_tokens=0, least=30), 3, 20, 3, 150),
        # 100 patches: 80 tokens each. Two images fit.
        (EncodingCost(patch_size=4, patch_tokens=0.8, pair_tokens=0), 3, 40, 2, 2 * EMBEDDINGS),
        # An image that exceeds the budget is encoded alone, with few tokens after it.
        (EncodingCost(patch_size=4, patch_tokens=4, pair_tokens=0), 1, 40, 1, 64),
        (EncodingCost(patch_size=4, patch_tokens=4, pair_tokens=0), 2, 40, 1, EMBEDDINGS),
    ],
)
def test_steps_have_room_for_encodings(
    cost: EncodingCost | None, images: int, edge: int, encoded: int, tokens: int
) -> None:
    plan = schedule(cost, images, edge)
    assert len(plan.encodings) == encoded
    assert [len(chunk.tokens) for chunk in plan.prefill] == [tokens]
