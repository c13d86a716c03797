"""Plans survive the way to the other ranks, and damaged ones do not become plans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from mizzen.core.params import SamplingParams
from mizzen.core.plan import PageWrites, PrefillChunk, SlotStart, StepPlan
from mizzen.wire.ring import MalformedPlan, decode_plan, encode_plan

INT32 = st.integers(0, 2**31 - 1)


def arrays(size: st.SearchStrategy[int] | int) -> st.SearchStrategy[np.ndarray]:
    return npst.arrays(np.int32, size, elements=INT32)


SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    max_tokens=st.none() | st.integers(1, 2**40),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(INT32, max_size=5).map(tuple),
)
STARTS = st.builds(SlotStart, slot=INT32, length=INT32, sampling=SAMPLING, seed=st.integers(0, 2**64 - 1))
CHUNKS = st.builds(
    PrefillChunk, slot=INT32, start=INT32, tokens=arrays(st.integers(1, 9)), last=st.booleans()
)
PLANS = st.builds(
    StepPlan,
    step=st.integers(1, 2**62),
    decode=arrays(st.integers(0, 9)),
    decode_version=st.integers(0, 2**62),
    pages=st.integers(0, 9).flatmap(lambda n: st.builds(PageWrites, arrays(n), arrays(n), arrays(n))),
    starts=st.lists(STARTS, max_size=4).map(tuple),
    prefill=st.lists(CHUNKS, max_size=4).map(tuple),
)


def same(one: StepPlan, other: StepPlan) -> bool:
    columns = [
        (one.decode, other.decode),
        (one.pages.slots, other.pages.slots),
        (one.pages.columns, other.pages.columns),
        (one.pages.pages, other.pages.pages),
        *((a.tokens, b.tokens) for a, b in zip(one.prefill, other.prefill, strict=True)),
    ]
    heads = [
        (
            plan.step,
            plan.decode_version,
            plan.starts,
            [(chunk.slot, chunk.start, chunk.last) for chunk in plan.prefill],
        )
        for plan in (one, other)
    ]
    equal = all(a.dtype == b.dtype == np.int32 and np.array_equal(a, b) for a, b in columns)
    return equal and heads[0] == heads[1]


@settings(deadline=None, max_examples=150)
@given(plan=PLANS)
def test_a_plan_comes_back_equal(plan: StepPlan) -> None:
    assert same(plan, decode_plan(encode_plan(plan)))
    assert same(plan, decode_plan(memoryview(encode_plan(plan))))


@settings(deadline=None, max_examples=150)
@given(plan=PLANS, data=st.data())
def test_a_damaged_plan_is_refused(plan: StepPlan, data: st.DataObject) -> None:
    frame = bytearray(encode_plan(plan))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(MalformedPlan):
        decode_plan(bytes(frame))


@given(plan=PLANS, cut=st.integers(1, 200), junk=st.binary(min_size=1, max_size=9))
@settings(deadline=None, max_examples=50)
def test_a_plan_of_another_length_is_refused(plan: StepPlan, cut: int, junk: bytes) -> None:
    frame = encode_plan(plan)
    with pytest.raises(MalformedPlan):
        decode_plan(frame[: max(0, len(frame) - cut)])
    with pytest.raises(MalformedPlan):
        decode_plan(frame + junk)


def test_a_decode_step_is_small() -> None:
    ints = np.arange(256, dtype=np.int32)
    plan = StepPlan(step=7, decode=ints, decode_version=3, pages=PageWrites(ints[:16], ints[:16], ints[:16]))
    assert len(encode_plan(plan)) == 64 + 4 * (256 + 3 * 16)


def test_stop_strings_do_not_travel() -> None:
    start = SlotStart(slot=0, length=0, sampling=SamplingParams(stop=("x",)), seed=1)
    plan = StepPlan(
        step=1, decode=np.empty(0, np.int32), decode_version=0, pages=PageWrites(), starts=(start,)
    )
    with pytest.raises(ValueError, match="stop strings"):
        encode_plan(plan)
