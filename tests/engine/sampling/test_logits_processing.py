# SPDX-License-Identifier: Apache-2.0
"""Bias, penalties, end bans, masks and log probabilities equal a NumPy reference, in mixed batches."""

from __future__ import annotations

from typing import Any

import logits_reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.core.request import Int32, Int64
from mizzen.core.sampling_params import MAX_LOGIT_BIAS, Grammar, GrammarKind, SamplingParams
from mizzen.core.step_plan import SlotOptions, SlotStart
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.sampling.sampler import process_logits, sample
from mizzen.engine.sampling.side_outputs import DeviceSideOutputs
from mizzen.engine.sampling.token_counts import TokenCounts
from mizzen.engine.uploader import Uploader

UPLOAD = Uploader(torch.device("cpu"))
VOCAB = 70
SLOTS = 6
tokens_ = st.integers(0, VOCAB - 1)
biases = st.dictionaries(tokens_, st.sampled_from((-100.0, -3.5, 0.25, 100.0)), max_size=6)
filters_only = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 1.0)),
    top_k=st.sampled_from((0, 5)),
    min_p=st.sampled_from((0.0, 0.1)),
)
with_logits_params = st.builds(
    lambda bias, logprobs, named, **rest: SamplingParams(
        logit_bias=tuple(bias.items()),
        logprobs=logprobs,
        logprob_token_ids=() if logprobs is None else named,
        **rest,
    ),
    bias=biases,
    named=st.sampled_from(((), (), (3,), (0, 69, 5))),
    temperature=st.sampled_from((0.0, 0.7, 1.0)),
    top_p=st.sampled_from((1.0, 0.8)),
    frequency_penalty=st.sampled_from((0.0, 0.3, -1.1, 2.0)),
    presence_penalty=st.sampled_from((0.0, 0.7, -2.0)),
    repetition_penalty=st.sampled_from((1.0, 1.3, 0.6, 10.0)),
    min_tokens=st.sampled_from((0, 2, 7)),
    logprobs=st.sampled_from((None, 0, 3, 20)),
)
token_lists = st.lists(tokens_, min_size=1, max_size=30)
requests = st.tuples(
    st.one_of(filters_only, with_logits_params, with_logits_params),
    token_lists,
    token_lists,
    st.lists(tokens_, max_size=3),
)


class ReferenceSlot:
    """A request in a slot, and its tokens so far, from which the reference is computed."""

    def __init__(self, slot: int, request: Any, output: bool) -> None:
        self.slot = slot
        self.params, prompt, output_so_far, ends = request
        self.prompt = prompt
        self.output = list(output_so_far) if output else []
        self.ends = tuple(sorted(set(ends)))
        self.options = SlotOptions(
            tokens=np.array(self.prompt + self.output, np.int32),
            prompt_tokens=len(self.prompt),
            end_tokens=self.ends,
        )

    @property
    def start(self) -> SlotStart:
        options = None if self.params in PLAIN else self.options
        return SlotStart(slot=self.slot, length=0, sampling=self.params, seed=self.slot, options=options)

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


class WithoutLogitsParams:
    """The set of all sampling parameters that need no logits processing.

    A request with such parameters starts without `options`.
    """

    def __contains__(self, params: object) -> bool:
        assert isinstance(params, SamplingParams)
        bare = SamplingParams(
            temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
        )
        return params == bare


PLAIN = WithoutLogitsParams()


def sample_alone(state: SlotState, slot_state: ReferenceSlot, row: np.ndarray) -> int:
    """Sample a token from a processed row of logits, in a batch with only this row."""
    alone = SlotState(SLOTS, 4, UPLOAD)
    alone.start_slots(
        (SlotStart(slot=slot_state.slot, length=0, sampling=slot_state.params, seed=slot_state.slot),)
    )
    sampled = sample(
        torch.from_numpy(row)[None],
        alone,
        np.array([slot_state.slot]),
        np.array([slot_state.position]),
        UPLOAD,
    )
    return int(sampled.tokens[0])


@settings(max_examples=120)
@given(
    batch=st.lists(st.tuples(requests, st.booleans()), min_size=1, max_size=SLOTS),
    seed=st.integers(0, 1000),
    steps=st.integers(1, 9),
)
def test_mixed_batches_equal_the_reference(batch: list[Any], seed: int, steps: int) -> None:
    state = SlotState(SLOTS, 4, UPLOAD, vocab=VOCAB)
    rng = np.random.default_rng(seed)
    slots = rng.permutation(SLOTS)[: len(batch)]
    rows = [ReferenceSlot(int(slot), *sampled) for slot, sampled in zip(slots, batch, strict=True)]
    state.start_slots(tuple(row.start for row in rows))
    for _ in range(steps):
        order = rng.permutation(len(rows))[: rng.integers(1, len(rows) + 1)]
        live = [rows[i] for i in order]
        logits = rng.normal(0, 3, (len(live), VOCAB)).astype(np.float32)
        before = torch.from_numpy(logits.copy())
        slots_and_positions = np.array([row.slot for row in live]), np.array([row.position for row in live])
        params = state.logits_params.gather_batch(*slots_and_positions)
        expected = [
            logits_reference.process(logit, row.params, row.prompt, row.output, row.ends)
            for logit, row in zip(logits, live, strict=True)
        ]
        if params is not None and len(params.rows):
            actual = process_logits(params, before, state, slots_and_positions[1][params.rows])
            np.testing.assert_array_equal(actual.numpy(), np.stack([expected[i] for i in params.rows]))
        sampled = sample(before, state, *slots_and_positions, UPLOAD)
        np.testing.assert_array_equal(before.numpy(), logits)  # the model's logits are not modified
        assert sampled.tokens.tolist() == [
            sample_alone(state, row, expected_row) for row, expected_row in zip(live, expected, strict=True)
        ]
        check_logprobs(live, expected, sampled.tokens.tolist(), sampled.logprobs)
        for row, token in zip(live, sampled.tokens.tolist(), strict=True):
            row.output.append(token)


def check_logprobs(
    live: list[ReferenceSlot], expected: list[np.ndarray], tokens: list[int], logprob_tensors: Any
) -> None:
    reporting = [i for i, row in enumerate(live) if row.params.logprobs is not None]
    parts = (
        []
        if logprob_tensors is None
        else DeviceSideOutputs(logprobs=(logprob_tensors,)).to_side_outputs().logprobs
    )
    assert [slot_logprobs.slot for slot_logprobs in parts] == [live[i].slot for i in reporting]
    for i, slot_logprobs in zip(reporting, parts, strict=True):
        exact = logits_reference.log_softmax(expected[i])
        top = live[i].params.logprobs
        token_ids = live[i].params.logprob_token_ids
        assert slot_logprobs.ids.shape == slot_logprobs.values.shape == (1, 1 + top + len(token_ids))
        assert slot_logprobs.ids[0, 1 + top :].tolist() == list(token_ids)
        assert slot_logprobs.ids[0, 0] == tokens[i]
        np.testing.assert_allclose(slot_logprobs.values[0], exact[slot_logprobs.ids[0]], atol=1e-5)
        np.testing.assert_allclose(
            slot_logprobs.values[0, 1 : 1 + top], np.sort(exact)[::-1][:top], atol=1e-5
        )


class IgnoresSlots:
    """Token masks that do not track which request is in which slot."""

    def start_slot(self, slot: int, grammar: Grammar, output: Int32) -> None:
        pass

    def free_slot(self, slot: int) -> None:
        pass

    def mark_applied(self) -> None:
        pass


class RandomMasks(IgnoresSlots):
    """Token masks that allow random tokens, at least one per slot."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.allowed: dict[int, np.ndarray] = {}

    def update_bitmasks(self, slots: Int64, positions: Int64) -> torch.Tensor:
        words = np.zeros((SLOTS, -(-VOCAB // 32)), np.uint32)
        for slot in slots.tolist():
            allowed = self.rng.random(VOCAB) < 0.1
            allowed[self.rng.integers(VOCAB)] = True
            self.allowed[slot] = allowed
            for token in np.flatnonzero(allowed):
                words[slot, token // 32] |= np.uint32(1) << np.uint32(token % 32)
        return torch.from_numpy(words.view(np.int32))


@pytest.mark.parametrize("seed", range(6))
def test_masks_apply_after_bias_penalties_and_end_bans(seed: int) -> None:
    rng = np.random.default_rng(seed)
    state = SlotState(SLOTS, 4, UPLOAD, vocab=VOCAB)
    state.logits_params.masks = masks = RandomMasks(rng)
    constrained = SamplingParams(
        grammar=Grammar(GrammarKind.JSON_OBJECT),
        min_tokens=3,
        frequency_penalty=0.5,
        logit_bias=((4, 100.0),),
    )
    sampled = [(constrained if i % 2 else SamplingParams(), [1, 2], [], [5, 6]) for i in range(SLOTS)]
    rows = [ReferenceSlot(i, request, False) for i, request in enumerate(sampled)]
    state.start_slots(tuple(row.start for row in rows))
    for _ in range(5):
        logits = rng.normal(0, 3, (SLOTS, VOCAB)).astype(np.float32)
        slots_and_positions = np.arange(SLOTS), np.array([row.position for row in rows])
        tokens = sample(torch.from_numpy(logits), state, *slots_and_positions, UPLOAD).tokens.tolist()
        for row, token, logit in zip(rows, tokens, logits, strict=True):
            allowed = masks.allowed.get(row.slot)
            expected_row = logits_reference.process(
                logit, row.params, row.prompt, row.output, row.ends, allowed
            )
            assert token == sample_alone(state, row, expected_row)
            assert allowed is None or allowed[token]
            row.output.append(token)


def test_a_grammar_that_allows_only_end_tokens_overrides_min_tokens() -> None:
    class EndOnly(IgnoresSlots):
        def update_bitmasks(self, slots: Int64, positions: Int64) -> torch.Tensor:
            words = torch.zeros((SLOTS, -(-VOCAB // 32)), dtype=torch.int32)
            words[:, 0] = 1 << 5
            return words

    for temperature in (0.0, 1e-3, 1.0):
        state = SlotState(SLOTS, 4, UPLOAD, vocab=VOCAB)
        state.logits_params.masks = EndOnly()
        params = SamplingParams(
            grammar=Grammar(GrammarKind.JSON_OBJECT), min_tokens=9, temperature=temperature, logprobs=2
        )
        row = ReferenceSlot(0, (params, [1], [], [5]), False)
        state.start_slots((row.start,))
        sampled = sample(torch.randn(1, VOCAB), state, np.array([0]), np.array([1]), UPLOAD)
        assert sampled.tokens.tolist() == [5]
        assert sampled.logprobs is not None
        (slot_logprobs,) = sampled.logprobs.to_slot_logprobs()
        assert slot_logprobs.values[0, 0] == 0
        assert slot_logprobs.values[0, 2] == -9999


def test_token_counts_grow_with_the_penalized_slots() -> None:
    counts = TokenCounts(100, VOCAB, UPLOAD)
    assert counts.table.numel() == 0
    some = np.array([3, 3, 5], np.int32)
    for slot in range(8):
        counts.start_slot(slot, some[:1], some[1:])
    assert counts.table.shape == (8, VOCAB)
    for slot in range(8, 100):
        counts.start_slot(slot, some[:1], some[1:])
    assert counts.table.shape == (100, VOCAB)
    counted = [counts.table[counts.row_by_slot[slot], 3].item() for slot in (0, 7, 99)]
    assert counted == [(1 << 30) + 1] * 3  # the counts survived the growth of the table
    for slot in range(100):
        counts.free_slot(slot)
    for slot in range(100):
        counts.start_slot(slot, some[:0], some[:0])
    assert counts.table.sum() == 0


def test_a_slot_drops_its_logits_params_when_the_next_request_has_none() -> None:
    state = SlotState(SLOTS, 4, UPLOAD, vocab=VOCAB)
    everything = SamplingParams(frequency_penalty=1, logprobs=2, logit_bias=((1, 1.0),), min_tokens=4)
    row = ReferenceSlot(2, (everything, [1], [], [3]), False)
    state.start_slots((row.start,))
    slots_and_positions = np.array([2]), np.array([9])
    assert state.logits_params.gather_batch(*slots_and_positions) is not None
    state.start_slots((SlotStart(slot=2, length=0, sampling=SamplingParams(), seed=0),))
    assert state.logits_params.gather_batch(*slots_and_positions) is None
    assert not state.logits_params.by_slot
    assert (state.logits_params.counts.row_by_slot == -1).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"frequency_penalty": 2.1}, "frequency_penalty must be between -2 and 2, not 2.1"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be between"),
        ({"repetition_penalty": 0}, "repetition_penalty must be between 0.01 and 10, not 0"),
        ({"min_tokens": -1}, "min_tokens must be between 0 and 2147483647, not -1"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty must be between 0.01 and 10, not 1e-39"),
        ({"top_k": 2**31}, r"top_k must be between 0 \(off\) and 2147483647"),
        ({"min_tokens": 2**63}, "min_tokens must be between 0 and 2147483647"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be between 0 and 20"),
        ({"logit_bias": ((3, 101.0),)}, "logit_bias must be between -100 and 100, not 101"),
        ({"logit_bias": ((3, float("nan")),)}, "logit_bias must be"),
        ({"logit_bias": ((3, 1.0),) * (MAX_LOGIT_BIAS + 1)}, "logit_bias must be at most 1024"),
        ({"logprobs": 1, "logprob_token_ids": (1,) * 129}, "logprob_token_ids must be at most 128 tokens"),
        ({"logprob_token_ids": (1,)}, "logprob_token_ids must be given with logprobs"),
    ],
)
def test_sampling_params_reject_values_out_of_range_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_token_fault_names_tokens_outside_the_vocabulary() -> None:
    assert SamplingParams(logit_bias=((VOCAB, 1.0),)).token_fault(VOCAB) == (
        "logit_bias holds 70; token ids go from 0 to 69"
    )
    assert "logprob_token_ids holds -1" in SamplingParams(logprobs=0, logprob_token_ids=(-1,)).token_fault(
        VOCAB
    )
    assert SamplingParams(stop_token_ids=(69,)).token_fault(VOCAB) == ""
