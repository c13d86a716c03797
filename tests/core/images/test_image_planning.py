# SPDX-License-Identifier: Apache-2.0
"""The scheduler encodes images before chunks use them, and requests the pixels that it lacks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_device import Device, Prompt, config, digest, encoding_cost, image_request
from msgspec import structs

from mizzen.core.events import AbortRequest, ProvideImage
from mizzen.core.images.counts import ImageUse
from mizzen.core.images.planner import PIXELS_AHEAD
from mizzen.core.request import FinishReason


def test_an_image_is_encoded_once_for_two_requests() -> None:
    device = Device(config(steps_in_flight=1, prefix_cache="none"))
    device.add(image_request(1, [1, 2, ("cat", 10), 3]))
    device.add(image_request(2, [4, ("cat", 10), 3]))
    device.run()
    assert device.encoded == [digest("cat")]
    assert device.requested == [(1, digest("cat"))]
    assert {end.reason for end in device.finished.values()} == {FinishReason.LENGTH}


def test_a_cached_prefix_needs_neither_pixels_nor_an_encoding() -> None:
    device = Device(config())
    device.add(image_request(1, [1, 2, ("cat", 10), *range(3, 9)]))
    device.run()
    device.add(image_request(2, [1, 2, ("cat", 10), *range(3, 9), 10, 11]))
    device.run()
    assert device.encoded == [digest("cat")]
    assert len(device.requested) == 1
    assert device.finished[2].cached_tokens == 16
    assert device.scheduler.images.use == ImageUse(admitted=2, prefix_hits=1, encoded=1)


def test_images_are_counted_once_by_the_work_that_they_need() -> None:
    device = Device(config(steps_in_flight=1, pages_total=16))
    device.add(image_request(1, [1, ("cat", 9), ("cat", 9), 2], max_tokens=30))
    device.add(image_request(2, [4, ("cat", 9), ("dog", 9), 3], max_tokens=30))
    device.run()
    assert sum(len(plan.starts) for plan in device.plans) > 2, "no request was retracted"
    device.add(image_request(3, [5, ("dog", 9), 6]))
    device.run()
    use = device.scheduler.images.use
    assert (use.admitted, use.prefix_hits, use.embedding_hits) == (4, 0, 2)
    assert use.encoded == len(device.encoded)


def test_equal_tokens_with_different_images_share_no_page() -> None:
    device = Device(config())
    for rid, name in enumerate(["cat", "dog", "cow"]):
        device.add(image_request(rid, [1, 2, (name, 10), *range(3, 9)]))
        device.run()
    assert [device.finished[rid].cached_tokens for rid in range(3)] == [0, 0, 0]
    assert len(device.encoded) == 3


def test_chunks_end_anywhere_in_an_image() -> None:
    device = Device(config(prefill_chunk_tokens=3, steps_in_flight=1))
    device.add(image_request(1, [1, ("cat", 7), 2, ("dog", 5), 3]))
    device.run()
    chunks = [chunk for plan in device.plans for chunk in plan.prefill]
    sizes: dict[bytes, list[tuple[int, int]]] = {}
    for chunk in chunks:
        for image in chunk.images:
            sizes.setdefault(image.digest, []).append((image.first, len(image.offsets)))
    for name, count in (("cat", 7), ("dog", 5)):
        parts = sizes[digest(name)]
        assert sum(part for _, part in parts) == count
        assert [first for first, _ in parts] == np.cumsum([0, *(part for _, part in parts)])[:-1].tolist()
    rotary = np.concatenate([chunk.rotary for chunk in chunks], axis=1)
    assert np.array_equal(rotary, device.requests[1].rotary)
    assert {start.rotary_offset for plan in device.plans for start in plan.starts} == {-3}


def test_a_second_image_waits_until_the_budget_allows_it() -> None:
    device = Device(config(prefill_chunk_tokens=16, steps_in_flight=1))
    device.add(image_request(1, [1, ("cat", 12), ("dog", 12), 3]))
    device.run()
    assert [len(plan.encodings) for plan in device.plans[:2]] == [1, 1]


def test_requests_without_images_go_on_while_others_wait_for_pixels() -> None:
    device = Device(config())
    device.provides = False
    device.add(image_request(1, [1, ("cat", 10), 3]))
    device.add(image_request(2, [1, 2, 3]))
    device.run(30)
    assert 2 in device.finished
    assert 1 not in device.finished
    device.events.append(AbortRequest(1))
    device.run()
    assert device.finished[1].reason is FinishReason.ABORT
    device.events.append(ProvideImage(digest("cat"), device.pixels(digest("cat"))))
    device.run()
    assert not device.scheduler.images._pixels


def test_if_the_request_that_requested_is_aborted_another_requests_it() -> None:
    device = Device(config())
    device.provides = False
    device.add(image_request(1, [1, ("cat", 10), 3]))
    device.add(image_request(2, [2, ("cat", 10), 3]))
    device.launch()
    assert device.requested == [(1, digest("cat"))]
    device.events.append(AbortRequest(1))
    device.provides = True
    device.run()
    assert device.requested == [(1, digest("cat")), (2, digest("cat"))]
    assert device.finished[2].reason is FinishReason.LENGTH


def test_pixels_of_waiting_requests_are_bounded() -> None:
    """Requests wait in turn for their pixels, and each gets them."""
    device = Device(config(image_capacity=12, max_running_requests=2, prefix_cache="none"))
    for rid in range(20):
        device.add(image_request(rid, [1, (f"image {rid}", 10), 3]))
    device.launch()
    assert len(device.requested) == PIXELS_AHEAD * 12 // 10
    device.run()
    assert {end.reason for end in device.finished.values()} == {FinishReason.LENGTH}
    assert len(device.finished) == 20
    assert not device.scheduler.images._pixels
    assert not device.scheduler.images.waits
    assert device.scheduler.images._ahead == 0


def test_many_waiting_requests_with_images_and_text_all_end() -> None:
    """The first waiting request never lacks pixels because later ones have them."""
    device = Device(config(image_capacity=12, max_running_requests=2, prefix_cache="none"))
    big = 500
    device.add(image_request(big, [1, *((f"large {index}", 10) for index in range(6)), 3]))
    for rid in range(200):
        device.add(image_request(rid, [1, (f"image {rid}", 10), 3]))
        device.launch()
    device.add(image_request(501, [1, 2, 3]))
    device.run(steps=5000)
    assert set(device.finished) == set(device.requests)


def test_no_request_is_retracted_for_one_that_waits_for_its_images() -> None:
    device = Device(config(max_running_requests=2, policy="priority", prefix_cache="none"))
    for rid in (1, 2):
        device.add(image_request(rid, [1, 2, 3], max_tokens=60))
    device.launch()
    device.collect()
    device.provides = False
    waiting = image_request(3, [1, ("cat", 10), 3])
    device.add(structs.replace(waiting, priority=5))
    for _ in range(20):
        device.launch()
        device.collect()
    assert sum(len(plan.starts) for plan in device.plans) == 2
    device.events.append(ProvideImage(digest("cat"), device.pixels(digest("cat"))))
    device.run()
    assert set(device.finished) == {1, 2, 3}
    assert sum(len(plan.starts) for plan in device.plans) == 4  # now it replaces one, which resumes


def test_a_digest_stands_for_images_of_one_size() -> None:
    device = Device(config())
    device.add(image_request(1, [1, ("cat", 10), 3]))
    device.add(image_request(2, [1, ("cat", 11), 3]))
    device.add(image_request(3, [1, ("dog", 9), 3, ("dog", 10)]))
    device.run()
    assert device.finished[1].reason is FinishReason.LENGTH
    for rid in (2, 3):
        assert "belongs to an image of another size" in device.finished[rid].message


def test_a_request_with_more_images_than_may_be_requested_in_advance_is_computed() -> None:
    device = Device(config(image_capacity=12, prefix_cache="none"))
    device.add(image_request(1, [1, *((f"image {index}", 10) for index in range(9)), 3]))
    device.run()
    assert device.finished[1].reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("capacity", "message"),
    [(0, "images: the model reads text only"), (9, "images: an image has 10 embeddings; the engine keeps 9")],
)
def test_an_image_that_never_fits_is_rejected(capacity: int, message: str) -> None:
    device = Device(config(image_capacity=capacity))
    device.add(image_request(1, [1, ("cat", 10), 3]))
    device.run()
    assert device.finished[1].message == message


def test_prompt_log_probabilities_of_images_are_rejected() -> None:
    device = Device(config())
    device.add(image_request(1, [1, ("cat", 10), 3], prompt_logprobs=1))
    device.run()
    assert "prompt_logprobs" in device.finished[1].message


prompts = st.lists(
    st.one_of(st.integers(1, 8), st.tuples(st.sampled_from(["a", "b", "c", "d"]), st.just(0))),
    min_size=1,
    max_size=12,
)
SIZES = {"a": 3, "b": 8, "c": 12, "d": 17}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.integers(0, 3), st.booleans()), min_size=1, max_size=12),
    st.integers(18, 40),
    st.integers(1, 24),
    st.integers(1, 3),
    st.sampled_from(["fcfs", "priority"]),
    st.integers(20, 60),
    st.integers(0, 5),
)
def test_random_requests_with_images_all_end(
    arrivals: list[tuple[Prompt, int, bool]],
    capacity: int,
    budget: int,
    depth: int,
    policy: str,
    pages: int,
    layers: int,
) -> None:
    """Every request ends, whatever is aborted, retracted or evicted; chunks find the embeddings they use.

    With `layers`, encodings are divided if they cost more than the budget.
    """
    device = Device(
        config(
            image_capacity=capacity,
            prefill_chunk_tokens=budget,
            steps_in_flight=depth,
            policy=policy,
            pages_total=pages,
            max_running_requests=3,
            reserve_tokens=0,
            encoding_cost=encoding_cost(20, layers) if layers else None,
        )
    )
    for rid, (parts, delay, aborts) in enumerate(arrivals):
        sized: Prompt = [part if isinstance(part, int) else (part[0], SIZES[part[0]]) for part in parts]
        request = image_request(rid, sized)
        if len(request.prompt) + 1 >= device.scheduler.config.capacity_tokens:
            continue
        device.add(request)
        for _ in range(delay):
            device.launch()
            device.collect()
        if aborts:
            device.events.append(AbortRequest(rid))
    device.run()
    assert set(device.finished) == set(device.requests)
    assert not device.scheduler.images._pixels
    assert not device.scheduler.images._users
    assert not device.scheduler.images.waits
    assert device.scheduler.images._ahead == 0
    assert set(device.scheduler.images._shapes) == set(device.embeddings)
    assert not device.scheduler.images.store._holders
