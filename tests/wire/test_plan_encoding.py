# SPDX-License-Identifier: Apache-2.0
"""Plans that are encoded for other ranks decode to equal plans; damaged frames are rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from mizzen.core.images.types import ChunkImage, ImageEncoding
from mizzen.core.request import Pooling
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.step_plan import PageWrites, PrefillChunk, SlotOptions, SlotStart, StepPlan
from mizzen.wire.ranks.plan_encoding import MalformedPlan, decode_plan, encode_plan

INT32 = st.integers(0, 2**31 - 1)


SIGNED = st.integers(-(2**31), 2**31 - 1)
DIGESTS = st.binary(min_size=32, max_size=32) | st.sampled_from([bytes(32), b"a" + bytes(31)])


def arrays(size: Any, elements: st.SearchStrategy[int] = INT32) -> st.SearchStrategy[np.ndarray]:
    return npst.arrays(np.int32, size, elements=elements)


OPTIONS = st.integers(1, 99).flatmap(
    lambda n: st.builds(
        SlotOptions,
        tokens=st.just(np.zeros(n, np.int32)),
        prompt_tokens=st.just(n),
        prompt_logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs_from=st.integers(1, 99),
        pooling=st.none() | st.sampled_from(Pooling),
    )
)
STARTS = st.builds(
    SlotStart,
    slot=INT32,
    length=INT32,
    sampling=st.just(SamplingParams(temperature=0)),
    seed=st.just(0),
    options=st.none() | OPTIONS,
    rotary_offset=SIGNED,
)
IMAGES = st.builds(ChunkImage, digest=DIGESTS, first=INT32, offsets=arrays(st.integers(0, 5)))
CHUNKS = st.integers(1, 9).flatmap(
    lambda n: st.builds(
        PrefillChunk,
        slot=INT32,
        start=INT32,
        tokens=arrays(n, SIGNED),
        last=st.booleans(),
        images=st.lists(IMAGES, max_size=3).map(tuple),
        rotary=st.none() | arrays((3, n)),
        pools=st.booleans(),
    )
)
ENCODINGS = st.builds(
    ImageEncoding,
    digest=DIGESTS,
    grid=st.tuples(INT32, INT32, INT32),
    embeddings=INT32,
    pixels=st.none() | st.just(np.zeros((1, 2, 2, 3), np.uint8)),
    layers=st.none() | st.just((0, 3)),
    last=st.booleans(),
)
PLANS = st.builds(
    StepPlan,
    step=st.integers(1, 2**62),
    decode=arrays(st.integers(0, 9)),
    decode_version=st.integers(0, 2**62),
    pages=st.integers(0, 9).flatmap(lambda n: st.builds(PageWrites, arrays(n), arrays(n), arrays(n))),
    starts=st.lists(STARTS, max_size=4).map(tuple),
    prefill=st.lists(CHUNKS, max_size=4).map(tuple),
    dropped_images=st.lists(DIGESTS, max_size=3).map(tuple),
    encodings=st.lists(ENCODINGS, max_size=3).map(tuple),
)


def are_equal(first: StepPlan, second: StepPlan) -> bool:
    columns = [
        (first.decode, second.decode),
        (first.pages.slots, second.pages.slots),
        (first.pages.columns, second.pages.columns),
        (first.pages.pages, second.pages.pages),
        *zip(chunk_arrays(first), chunk_arrays(second), strict=True),
    ]
    heads = [
        (
            plan.step,
            plan.decode_version,
            [
                (start.slot, start.length, start.sampling, start.rotary_offset, options_sent(start.options))
                for start in plan.starts
            ],
            [
                (
                    chunk.slot,
                    chunk.start,
                    chunk.last,
                    chunk.pools,
                    chunk.rotary is None,
                    [(image.digest, image.first) for image in chunk.images],
                )
                for chunk in plan.prefill
            ],
            [(each.digest, each.grid, each.embeddings) for each in plan.encodings if each.last],
            plan.dropped_images,
        )
        for plan in (first, second)
    ]
    equal = all(a.dtype == b.dtype == np.int32 and np.array_equal(a, b) for a, b in columns)
    return equal and heads[0] == heads[1]


def chunk_arrays(plan: StepPlan) -> list[np.ndarray]:
    """Return all arrays of the chunks of a plan."""
    arrays = [chunk.tokens for chunk in plan.prefill]
    arrays += [image.offsets for chunk in plan.prefill for image in chunk.images]
    return arrays + [chunk.rotary for chunk in plan.prefill if chunk.rotary is not None]


def options_sent(options: SlotOptions | None) -> object:
    """Return the options that other ranks receive; token ids are not sent and decode as zeros."""
    return options and (
        options.tokens.tolist(),
        options.prompt_tokens,
        options.prompt_logprobs,
        options.prompt_logprobs_from,
        options.pooling,
    )


@settings(max_examples=150)
@given(plan=PLANS)
def test_a_decoded_plan_equals_the_encoded_plan(plan: StepPlan) -> None:
    decoded = decode_plan(encode_plan(plan))
    assert are_equal(plan, decoded)
    assert all(encoding.last and encoding.pixels is None for encoding in decoded.encodings)
    assert are_equal(plan, decode_plan(memoryview(encode_plan(plan))))


@settings(max_examples=150)
@given(plan=PLANS, data=st.data())
def test_a_damaged_plan_is_rejected(plan: StepPlan, data: st.DataObject) -> None:
    frame = bytearray(encode_plan(plan))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(MalformedPlan):
        decode_plan(bytes(frame))


@given(plan=PLANS, cut=st.integers(1, 200), junk=st.binary(min_size=1, max_size=9))
@settings(max_examples=50)
def test_a_truncated_or_extended_plan_is_rejected(plan: StepPlan, cut: int, junk: bytes) -> None:
    frame = encode_plan(plan)
    with pytest.raises(MalformedPlan):
        decode_plan(frame[: max(0, len(frame) - cut)])
    with pytest.raises(MalformedPlan):
        decode_plan(frame + junk)


def test_an_encoded_decode_step_is_small() -> None:
    ints = np.arange(256, dtype=np.int32)
    plan = StepPlan(step=7, decode=ints, decode_version=3, pages=PageWrites(ints[:16], ints[:16], ints[:16]))
    assert len(encode_plan(plan)) == 64 + 4 * (256 + 3 * 16)


def test_sampling_parameters_are_not_sent_to_other_ranks() -> None:
    tokens = np.arange(5, dtype=np.int32)
    start = SlotStart(
        slot=3,
        length=2,
        sampling=SamplingParams(temperature=0.7, stop=("x",), logit_bias=((4, 1.0),)),
        seed=9,
        options=SlotOptions(tokens=tokens, prompt_tokens=4, end_tokens=(2,), prompt_logprobs=1),
    )
    plan = StepPlan(step=1, decode=tokens[:0], decode_version=0, pages=PageWrites(), starts=(start,))
    (decoded,) = decode_plan(encode_plan(plan)).starts
    assert (decoded.slot, decoded.length, decoded.sampling, decoded.seed) == (
        3,
        2,
        SamplingParams(temperature=0),
        0,
    )
    assert options_sent(decoded.options) == ([0] * 4, 4, 1, 1, None)
