# SPDX-License-Identifier: Apache-2.0
"""The top-k/top-p/min-p kernel samples the same tokens as the eager sampler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mizzen.core.sampling_params import Grammar, GrammarKind, SamplingParams
from mizzen.core.step_plan import SlotOptions, SlotStart
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.sampling.graph_penalties import GraphPenalties
from mizzen.engine.sampling.sampler import sample, sample_random
from mizzen.engine.uploader import Uploader
from mizzen.kernels.sampling import top_k_top_p

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
UPLOAD = Uploader(DEVICE)
KINDS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 50, "top_p": 0.9},
    {"top_p": 0.5, "min_p": 0.02},
    {"temperature": 0.3, "top_p": 0.95, "top_k": 20},
    {"temperature": 1.9, "top_p": 0.99},
    {"min_p": 0.1},
    {"top_k": 3000},
    {"top_p": 1e-6},
    {"top_p": 1e-46},
    {"min_p": 1.0, "temperature": 1.3},
    {"temperature": 0.05, "top_p": 0.8},
    {"top_k": 400, "top_p": 0.3, "min_p": 0.001},
]


def start_slots(
    kinds: list[dict[str, Any]], vocab: int = 0, token_count: int = 0
) -> tuple[SlotState, np.ndarray]:
    """Start a slot for each kind of sampling parameters; return the state and the slots' numbers.

    Each slot has `token_count` tokens so far; a third of them are its prompt.
    """
    count = len(kinds)
    state = SlotState(count + 3, 4, UPLOAD, scratch_page=0, vocab=vocab)
    slots = np.random.default_rng(0).permutation(count + 3)[:count].astype(np.int64)
    starts = []
    for number, (slot, kind) in enumerate(zip(slots.tolist(), kinds, strict=True)):
        tokens = np.random.default_rng(number).integers(0, vocab or 1, token_count).astype(np.int32)
        options = SlotOptions(tokens=tokens, prompt_tokens=token_count // 3) if token_count else None
        sampling = SamplingParams(**kind)
        starts.append(
            SlotStart(slot=slot, length=0, sampling=sampling, seed=number * 2**60 + 11, options=options)
        )
    state.start_slots(tuple(starts))
    return state, slots


def sample_rows(
    logits: torch.Tensor, state: SlotState, slots: np.ndarray, positions: np.ndarray, rows: list[int]
) -> list[int]:
    """Sample `rows` with the kernel; check that other rows are unchanged, and return the tokens."""
    assert top_k_top_p.supports(logits.shape[1], logits.dtype, DEVICE)
    tokens = torch.full((len(slots),), -1, dtype=torch.int64, device=DEVICE)
    slots_and_positions = UPLOAD.upload_together(slots.astype(np.int32), positions.astype(np.int32))
    top_k_top_p.sample_top_k_top_p(
        logits, UPLOAD(np.array(rows, np.int64)), *slots_and_positions, state.sampling_tensors, tokens
    )
    other_rows = np.setdiff1d(np.arange(len(slots)), rows)
    assert (tokens[UPLOAD(other_rows)] == -1).all()
    return tokens[UPLOAD(np.array(rows, np.int64))].tolist()


def random_logits(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * 3).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 5, 300, 32003, 128256, 151936])
def test_sampled_tokens_equal_the_eager_samplers(vocab: int, dtype: torch.dtype) -> None:
    count = 144
    state, slots = start_slots([KINDS[i % len(KINDS)] for i in range(count)])
    logits, positions = random_logits(count, vocab, dtype), np.arange(100, 100 + count)
    expected = sample_random(logits, state, slots, positions, UPLOAD).tolist()
    assert sample_rows(logits, state, slots, positions, list(range(count))) == expected
    some = [3, 7, 100]
    assert sample_rows(logits, state, slots, positions, some) == [expected[row] for row in some]


@pytest.mark.parametrize("vocab", [9, 4000, 151936])
def test_tied_logits_are_all_kept_or_all_dropped(vocab: int) -> None:
    count = 400
    state, slots = start_slots([{"top_k": 2, "top_p": [1.0, 0.4][i % 2]} for i in range(count)])
    logits = torch.zeros(count, vocab, device=DEVICE)
    high = [1, vocab // 2, vocab - 1]
    logits[:, high] = 3.0
    positions = np.arange(count)
    actual = sample_rows(logits, state, slots, positions, list(range(count)))
    assert actual == sample_random(logits, state, slots, positions, UPLOAD).tolist()
    assert set(actual) == set(high)


def test_extreme_logits_are_sampled_correctly() -> None:
    vocab, lowest = 151936, float("-inf")
    logits = torch.full((7, vocab), -1e9, device=DEVICE)
    logits[0, vocab - 1] = 0.0
    logits[1] = lowest
    logits[1, 77] = -5.0
    logits[2] = lowest
    logits[3] = torch.linspace(-80, 80, vocab, device=DEVICE)
    logits[4] = 0.0
    logits[5] = float("nan")
    logits[6] = 0.0
    logits[6, [9, 70_000]] = 8.0
    state, slots = start_slots(
        [
            {"top_k": 30},
            {"top_p": 0.9, "top_k": 3},
            {"top_p": 0.5},
            {"top_p": 0.1},
            {"min_p": 0.5},
            {"top_p": 0.5, "top_k": 9},
            {"top_p": 1e-46, "temperature": 1e-40},
        ]
    )
    positions = np.arange(7)
    actual = sample_rows(logits, state, slots, positions, list(range(7)))
    expected = sample_random(logits, state, slots, positions, UPLOAD).tolist()
    assert actual[:3] == [vocab - 1, 77, vocab - 1]
    assert actual[3:5] == expected[3:5]
    assert actual[5] == vocab - 1
    assert actual[6] == expected[6]
    assert actual[6] in (9, 70_000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("vocab", [70, 9001, 151936])
def test_penalties_and_masks_are_applied_and_counted(vocab: int, masked: bool, dtype: torch.dtype) -> None:
    more = {"frequency_penalty": 1.5, "presence_penalty": 0.4, "repetition_penalty": 1.3}
    grammar = Grammar(GrammarKind.JSON_OBJECT) if masked else None
    kinds = [{**KINDS[i % len(KINDS)], **(more if i % 3 else {}), "grammar": grammar} for i in range(24)]
    (plain, slots), (subject, _) = start_slots(kinds, vocab, 300), start_slots(kinds, vocab, 300)
    words = np.random.default_rng(vocab).integers(-(2**31), 2**31, (30, -(-vocab // 32)), dtype=np.int64)
    bitmask = UPLOAD(words.astype(np.int32))
    plain.logits_params.masks = SimpleNamespace(update_bitmasks=lambda *_: bitmask, mark_applied=lambda: None)  # type: ignore[assignment]
    assert subject.scratch_slot is not None
    penalties = GraphPenalties(subject.logits_params, subject.scratch_slot + 1)
    penalties.set_batch(slots, np.empty(0, np.int64))
    tokens = torch.zeros(len(slots), dtype=torch.int64, device=DEVICE)
    rows = UPLOAD(np.arange(len(slots)))
    for step in range(3):
        logits, positions = random_logits(len(slots), vocab, dtype, step), np.arange(301, 325) + step
        expected_tokens = sample(logits.clone(), plain, slots, positions, UPLOAD).tokens
        slots_and_positions = UPLOAD.upload_together(slots.astype(np.int32), positions.astype(np.int32))
        top_k_top_p.sample_top_k_top_p(
            logits,
            rows,
            *slots_and_positions,
            subject.sampling_tensors,
            tokens,
            subject.last_tokens,
            bitmask if masked else None,
            penalties,
        )
        assert tokens.tolist() == expected_tokens.tolist()
        assert subject.last_tokens[UPLOAD(slots)].tolist() == expected_tokens.tolist()
    counted = [
        subject.logits_params.counts.table[subject.logits_params.counts.row_by_slot[slot]]
        for slot in slots[1::3]
    ]
    expected = [
        plain.logits_params.counts.table[plain.logits_params.counts.row_by_slot[slot]] for slot in slots[1::3]
    ]
    assert all(
        torch.equal(counts, expected_counts)
        for counts, expected_counts in zip(counted, expected, strict=True)
    )
