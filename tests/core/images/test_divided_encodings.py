# SPDX-License-Identifier: Apache-2.0
"""While streams decode, encodings that take long are divided among steps by layers."""

from __future__ import annotations

import numpy as np
import pytest
from image_device import Device, config, digest, encoding_cost, image_request

from mizzen.core.events import AbortRequest
from mizzen.core.images.cost import EncodingCost
from mizzen.core.request import FinishReason
from mizzen.core.step_plan import StepPlan

LAYERS = 10
COST = 60
"""Cost of an image, in prompt tokens."""


def make_device(budget: int, *, streams: bool, depth: int = 2, cost: EncodingCost | None = None) -> Device:
    """Return a device on which a stream decodes."""
    cost = cost or encoding_cost(COST, LAYERS)
    device = Device(config(prefill_chunk_tokens=budget, encoding_cost=cost, steps_in_flight=depth))
    if streams:
        device.add(image_request(100, [1, 2, 3], max_tokens=40))
        device.launch()
        device.collect()
        device.launch()
    return device


def parts(device: Device, name: str) -> list[StepPlan]:
    """Return the steps that encode an image."""
    return [plan for plan in device.plans if any(each.digest == digest(name) for each in plan.encodings)]


@pytest.mark.parametrize(
    ("budget", "layers"),
    [
        (5, [(layer, layer + 1) for layer in range(LAYERS)]),
        (6, [(layer, layer + 1) for layer in range(LAYERS)]),
        (25, [(0, 4), (4, 8), (8, 10)]),
        (59, [(0, 9), (9, 10)]),
    ],
)
def test_steps_with_streams_encode_as_many_layers_as_fit(budget: int, layers: list[tuple[int, int]]) -> None:
    device = make_device(budget, streams=True)
    device.add(image_request(1, [1, 2, ("cat", 10), 3]))
    device.run()
    steps = parts(device, "cat")
    assert [plan.encodings[0].layers for plan in steps] == layers
    assert np.array_equal([plan.step for plan in steps], steps[0].step + np.arange(len(steps)))
    assert all(len(plan.decode) for plan in steps)
    assert [bool(plan.prefill) for plan in steps] == [False] * (len(steps) - 1) + [True]
    [text] = [plan for plan in device.plans if plan.step == steps[0].step - 1]
    assert [len(chunk.tokens) for chunk in text.prefill] == [2], "the text before the image comes first"
    assert device.encoded == [digest("cat")]
    assert {end.reason for end in device.finished.values()} == {FinishReason.LENGTH}


def test_nothing_is_divided_without_streams_or_if_it_fits() -> None:
    for device in (make_device(20, streams=False), make_device(COST + 1, streams=True)):
        device.add(image_request(1, [("cat", 10), 3]))
        device.run()
        [plan] = parts(device, "cat")
        assert plan.encodings[0].layers is None


def test_the_rest_follows_at_once_when_the_last_stream_has_ended() -> None:
    device = make_device(6, streams=True, depth=1)
    device.add(image_request(1, [("cat", 10), 3]))
    while len(parts(device, "cat")) < 3:
        device.launch()
        device.collect()
    device.events.append(AbortRequest(100))
    device.run()
    assert [plan.encodings[0].layers for plan in parts(device, "cat")][-2:] == [(2, 3), (3, LAYERS)]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_other_images_wait_for_a_divided_one(together: bool, small: bool) -> None:
    """Even if a small image fits beside the last layers, memory suffices for one of them only."""
    device = make_device(59, streams=True)
    device.small = {digest("dog")} if small else set()
    if together:
        device.add(image_request(1, [("cat", 10), ("dog", 10), 3]))
    else:
        device.add(image_request(1, [("cat", 10), 3]))
        device.add(image_request(2, [("dog", 10), 3]))
    device.run()
    assert device.encoded == [digest("cat"), digest("dog")]
    assert max(plan.step for plan in parts(device, "cat")) < min(plan.step for plan in parts(device, "dog"))


def test_layers_of_an_aborted_request_are_used_by_the_next_one() -> None:
    device = make_device(6, streams=True)
    device.add(image_request(1, [("cat", 10), 3]))
    while len(parts(device, "cat")) < 4:
        device.launch()
        device.collect()
    device.events.append(AbortRequest(1))
    device.add(image_request(2, [("cat", 10), 4]))
    device.run()
    assert [plan.encodings[0].layers for plan in parts(device, "cat")] == [
        (layer, layer + 1) for layer in range(LAYERS)
    ]
    assert device.finished[2].reason is FinishReason.LENGTH


def test_another_image_displaces_the_layers_of_an_aborted_request() -> None:
    device = make_device(6, streams=True)
    for rid, name in ((1, "cat"), (2, "dog"), (3, "cat")):
        device.add(image_request(rid, [(name, 10), 3]))
        if rid == 1:
            while len(parts(device, "cat")) < 4:
                device.launch()
                device.collect()
            device.events.append(AbortRequest(1))
    device.run()
    begins = [plan.encodings[0].layers for plan in parts(device, "cat")]
    assert begins.count((0, 1)) == 2
    assert device.encoded == [digest("dog"), digest("cat")]


@pytest.mark.parametrize(
    ("budget", "layers"), [(25, [(0, 6), (6, 10)]), (13, [(0, 3), (3, 6), (6, 9), (9, 10)]), (41, [None])]
)
def test_launches_of_small_images_are_divided_too(budget: int, layers: list[tuple[int, int] | None]) -> None:
    """The launches of a layer take as long as 4 tokens, its operations as long as half a token."""
    device = make_device(budget, streams=True, cost=encoding_cost(5, LAYERS, least=40))
    device.add(image_request(1, [("cat", 10), 3]))
    device.run()
    assert [plan.encodings[0].layers for plan in parts(device, "cat")] == layers


def test_small_images_share_the_launches_of_a_step() -> None:
    device = make_device(30, streams=True, cost=encoding_cost(5, LAYERS, least=15))
    device.add(image_request(1, [("cat", 5), ("dog", 5), 3]))
    device.run()
    assert parts(device, "cat") == parts(device, "dog")
    assert [each.layers for each in parts(device, "cat")[0].encodings] == [None, None]


def test_layers_with_attention_to_all_patches_cost_more() -> None:
    cost = EncodingCost(
        patch_size=1, patch_tokens=1, pair_tokens=0.25, full_layers=(False, False, True, False)
    )
    pixels = np.zeros((1, 4, 4, 3), np.uint8)  # 16 for the patches, and 64 for the attention of one layer
    assert cost.tokens(pixels, first=True) == 80
    assert cost.divide(pixels, 0, 1) == (1, 4)
    assert cost.divide(pixels, 0, 71) == (2, 8)
    assert cost.divide(pixels, 2, 10) == (3, 68)
    assert cost.divide(pixels, 2, 1000) == (4, 72)
