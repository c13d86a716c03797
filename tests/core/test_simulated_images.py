# SPDX-License-Identifier: Apache-2.0
"""The simulated device accepts valid plans with images, and names the rule that others violate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from mizzen.core.images.types import ChunkImage, ImageEncoding
from mizzen.core.request import Int32
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.step_plan import PageWrites, PrefillChunk, SlotStart, StepPlan
from mizzen.engine.simulated.device import PlanViolation, SimulatedDevice
from mizzen.engine.simulated.scripts import echo

FIRST, SECOND = b"a" * 32, b"b" * 32
PROMPT = np.array([5, -7, -7, -7, 6, -9, 4], np.int32)
IMAGES = (
    ChunkImage(digest=FIRST, first=0, offsets=np.array([1, 2, 3], np.int32)),
    ChunkImage(digest=SECOND, first=0, offsets=np.array([5], np.int32)),
)


def encoding(digest: bytes, embeddings: int) -> ImageEncoding:
    return ImageEncoding(
        digest=digest, grid=(1, 1, embeddings), embeddings=embeddings, pixels=np.zeros((1, 1, 1, 3), np.uint8)
    )


def part(begin: int, end: int, *, last: bool = False) -> ImageEncoding:
    """Return some layers of the first image."""
    pixels = None if begin else np.zeros((1, 1, 1, 3), np.uint8)
    return replace(encoding(FIRST, 3), pixels=pixels, layers=(begin, end), last=last)


def make_device(capacity: int = 4) -> SimulatedDevice:
    sizes: dict[str, Any] = {"slots": 2, "pages": 8, "page_size": 4, "context_length": 16}
    return SimulatedDevice(**sizes, script=echo(3), vocab_size=12, image_capacity=capacity)


def make_plan(step: int = 1, tokens: Int32 = PROMPT, **changes: Any) -> StepPlan:
    """Return a plan that encodes both images and computes the whole prompt in slot 0."""
    chunk = PrefillChunk(slot=0, start=0, tokens=tokens, last=True, images=IMAGES)
    columns = np.arange(4, dtype=np.int32)
    plan = StepPlan(
        step=step,
        decode=np.empty(0, np.int32),
        decode_version=0,
        pages=PageWrites(np.zeros(4, np.int32), columns, columns),
        starts=(SlotStart(slot=0, length=0, sampling=SamplingParams(), seed=0),),
        prefill=(chunk,),
        encodings=(encoding(FIRST, 3), encoding(SECOND, 1)),
    )
    return replace(plan, **changes)


def decode_plan(step: int) -> StepPlan:
    return StepPlan(step=step, decode=np.zeros(1, np.int32), decode_version=1, pages=PageWrites())


def test_tokens_after_images_read_the_kv_of_images() -> None:
    device = make_device()
    answer = [int(device.execute(make_plan()).tokens[0, 0])]
    answer += [int(device.execute(decode_plan(step)).tokens[0, 0]) for step in range(2, 9)]
    # The script repeats the prompt; ids of images become valid ids.
    assert answer == [5, 6, 6, 6, 6, 8, 4, 3]


def test_a_step_may_only_encode_and_images_stay_until_they_are_dropped() -> None:
    device = make_device()
    device.execute(make_plan(prefill=(), starts=()))
    device.execute(make_plan(step=2, encodings=()))
    with pytest.raises(PlanViolation, match="not kept"):
        device.execute(make_plan(step=3, encodings=(), dropped_images=(SECOND,)))


def test_layers_of_a_divided_encoding_follow_each_other() -> None:
    device, nothing = make_device(), {"starts": (), "prefill": (), "pages": PageWrites()}
    device.execute(make_plan(1, encodings=(encoding(SECOND, 1),), **nothing))
    device.execute(make_plan(2, encodings=(part(0, 2),), **nothing))
    device.execute(make_plan(3, encodings=(part(2, 3, last=True),)))
    with pytest.raises(PlanViolation, match="without the layers before 2"):
        device.execute(make_plan(4, dropped_images=(FIRST,), encodings=(part(2, 3, last=True),), **nothing))


def chunk(images: tuple[ChunkImage, ...] = IMAGES, **changes: Any) -> dict[str, Any]:
    """Return the change of a plan whose only chunk has other fields."""
    whole = PrefillChunk(slot=0, start=0, tokens=PROMPT, last=True, images=images)
    return {"prefill": (replace(whole, **changes),)}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"encodings": (encoding(FIRST, 3),)}, "uses the image 6262.*not kept"),
        ({"encodings": (encoding(FIRST, 2), encoding(SECOND, 1))}, "uses embeddings 0 to 2 of 2"),
        ({"encodings": (encoding(FIRST, 3), encoding(SECOND, 2))}, "keeps 5 embeddings, more than 4"),
        ({"encodings": (encoding(FIRST, 3), encoding(FIRST, 1))}, "kept already"),
        ({"encodings": (replace(encoding(FIRST, 3), pixels=None),)}, "without its pixels"),
        ({"encodings": (part(1, 2, last=True), encoding(SECOND, 1))}, "without the layers before 1"),
        ({"encodings": (part(0, 2), encoding(SECOND, 1))}, "uses the image 6161.*not kept"),
        ({"dropped_images": (FIRST,)}, "drops the image 6161.*not kept"),
        (chunk(IMAGES[:1]), "replaces tokens other than"),
        (chunk((*IMAGES, IMAGES[1])), "replaces tokens other than"),
        (chunk(tokens=np.abs(PROMPT)), "replaces tokens other than"),
        (chunk((replace(IMAGES[0], offsets=np.array([1, 3, 2], np.int32)), IMAGES[1])), "in order"),
        (chunk((replace(IMAGES[0], first=1), IMAGES[1])), "uses embeddings 1 to 3 of 3"),
        (chunk(rotary=np.zeros((3, 6), np.int32)), "rotary positions of shape"),
    ],
)
def test_a_plan_that_violates_a_rule_is_refused(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(PlanViolation, match=rule):
        make_device().execute(make_plan(**changes))
