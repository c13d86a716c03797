# SPDX-License-Identifier: Apache-2.0
"""Ids of images in the keys of the prefix cache are exact: no two images share one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.core.images import keys as module
from mizzen.core.images.keys import ImageKeys, image_token


def digest(number: int, first: int = 0) -> bytes:
    return first.to_bytes(4, "big") + number.to_bytes(28, "big")


def test_an_id_is_negative_and_made_of_the_first_31_bits() -> None:
    assert image_token(bytes(32)) == -1
    assert image_token(b"\x00\x00\x00\x02" + bytes(28)) == -2
    assert image_token(b"\xff" * 32) == -(2**31)


def test_images_whose_digests_begin_alike_have_different_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_SWEEP", 300)
    keys = ImageKeys()
    digests = [digest(number) for number in range(1000)]
    ids = [keys.assign(one, lambda: (), digests) for one in digests]
    assert len(set(ids)) == len(digests)
    assert all(-(2**31) <= one < 0 for one in ids)
    assert [keys.assign(one, lambda: (), digests) for one in digests] == ids


def test_ids_wrap_around_at_the_end_of_int32() -> None:
    keys = ImageKeys()
    last = 0xFFFFFFFF
    assert keys.assign(digest(0, last), lambda: (), ()) == -(2**31)
    assert keys.assign(digest(1, last), lambda: (), ()) == -1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_an_id_in_use_is_never_given_to_another_image(images: list[tuple[int, int]]) -> None:
    """An id in use keeps its image, also when unused ids are forgotten all the time."""
    keys = ImageKeys()
    keys._sweep_at = 0  # forget at each new image
    cached: dict[int, bytes] = {}
    for step, (number, first) in enumerate(images):
        one = digest(number, first)
        token = keys.assign(one, lambda: cached, [])
        assert cached.get(token, one) == one
        if step % 3:
            cached[token] = one
        keys._sweep_at = 0


def test_unused_images_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_SWEEP", 100)
    keys = ImageKeys()
    live = [digest(number, 2 * number) for number in range(10)]
    for one in live:
        keys.assign(one, lambda: (), live)
    for number in range(1000):
        keys.assign(digest(number, 2 * (number % 60 + 50)), lambda: (), live)
        assert len(keys) <= module._FIRST_SWEEP
    ids = {keys.assign(one, lambda: (), live) for one in live}
    assert ids == {image_token(one) for one in live}
