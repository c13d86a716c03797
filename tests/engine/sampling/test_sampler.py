# SPDX-License-Identifier: Apache-2.0
"""Sampling follows the reference distribution, and a row's token is the same alone and in a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from distribution import KINDS, check_counts, filtered

from mizzen.core.sampling_params import SamplingParams
from mizzen.core.step_plan import SlotStart
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.sampling.rng import uniform
from mizzen.engine.sampling.sampler import sample
from mizzen.engine.uploader import ALIGNMENT, Uploader

UPLOAD = Uploader(torch.device("cpu"))
VOCAB = 12


def sample_rows(
    logits: torch.Tensor, params: list[SamplingParams], positions: list[int], seeds: list[int]
) -> list[int]:
    """Sample one row per entry of `params`; the rows are in randomly ordered slots."""
    state = SlotState(len(params) + 3, 4, UPLOAD)
    slots = np.random.default_rng(0).permutation(len(params) + 3)[: len(params)].astype(np.int64)
    starts = zip(slots, params, seeds, strict=True)
    state.start_slots(tuple(SlotStart(slot=int(s), length=0, sampling=p, seed=seed) for s, p, seed in starts))
    return sample(logits, state, slots, np.array(positions, np.int64), UPLOAD).tokens.tolist()


def count_samples(logits: torch.Tensor, params: SamplingParams, count: int) -> np.ndarray:
    """Sample `count` positions with one seed; return how often each token was sampled, [vocab]."""
    rows = logits.expand(count, -1)
    tokens = sample_rows(rows, [params] * count, list(range(count)), [5] * count)
    return np.bincount(tokens, minlength=logits.shape[-1])


@pytest.mark.parametrize("params", KINDS, ids=str)
def test_samples_follow_the_filtered_distribution(params: SamplingParams) -> None:
    torch.manual_seed(3)
    logits = torch.randn(VOCAB) * 1.5
    check_counts(count_samples(logits, params, 20000), filtered(logits, params))


def test_a_rows_token_is_the_same_alone_and_in_a_batch() -> None:
    torch.manual_seed(4)
    logits = torch.randn(40, 300)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.05, temperature=2),
        SamplingParams(top_k=30, top_p=0.9, temperature=0.7),
    ]
    params = [kinds[i % len(kinds)] for i in range(40)]
    positions, seeds = list(range(100, 140)), [i * 2**57 + 11 for i in range(40)]
    together = sample_rows(logits, params, positions, seeds)
    alone = [sample_rows(logits[i : i + 1], [params[i]], [positions[i]], [seeds[i]])[0] for i in range(40)]
    assert together == alone
    greedy = [i for i in range(40) if params[i].temperature == 0]
    assert [together[i] for i in greedy] == logits[greedy].argmax(-1).tolist()


@pytest.mark.parametrize("lowest", [float("-inf"), float("nan")])
def test_a_row_without_possible_tokens_does_not_affect_others(lowest: float) -> None:
    logits = torch.zeros(3, 50)
    logits[1] = lowest
    params = [SamplingParams(top_k=5, top_p=0.9, min_p=0.1)] * 3
    tokens = sample_rows(logits, params, [5, 6, 7], [1, 2, 3])
    assert 0 <= tokens[1] < 50
    assert [tokens[0], tokens[2]] == sample_rows(logits[::2], params[::2], [5, 7], [1, 3])


def test_different_seeds_and_positions_sample_different_tokens() -> None:
    logits = torch.zeros(64, 1000)
    params = [SamplingParams()] * 64
    by_seed = sample_rows(logits, params, [7] * 64, list(range(64)))
    by_position = sample_rows(logits, params, list(range(64)), [7] * 64)
    assert len(set(by_seed)) > 50
    assert len(set(by_position)) > 50
    assert by_seed == sample_rows(logits, params, [7] * 64, list(range(64)))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64])
def test_arrays_uploaded_together_are_each_aligned(count: int) -> None:
    """For unaligned operands, Triton would compile another kernel variant while the engine serves."""
    numbers = np.arange(3 * count, dtype=np.int64).reshape(3, count)
    for arrays in (numbers, numbers.astype(np.float32), numbers.astype(np.int32)):
        uploaded = UPLOAD.upload_together(*arrays)
        assert [array.tolist() for array in uploaded] == arrays.tolist()
        assert all(array.is_contiguous() and array.data_ptr() % ALIGNMENT == 0 for array in uploaded)
        assert {array.dtype for array in uploaded} == {torch.from_numpy(arrays).dtype}


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    seeds = torch.arange(-200, 200)[:, None].expand(400, 400).reshape(-1)
    positions = torch.arange(400).repeat(400)
    values = uniform(seeds, positions).view(400, 400)
    assert 0 <= values.min() < 1e-4
    assert 1 - 1e-4 < values.max() < 1
    counts = torch.histc(values, bins=100, min=0, max=1)
    assert ((counts - 1600) ** 2 / 1600).sum() < 160
    centred = values - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1)):
        assert abs((centred * other).mean() * 12) < 0.01


def test_filters_keep_the_only_possible_token() -> None:
    logits = torch.full((3, 50), -1e9)
    logits[:, 17] = 0.0
    strict = SamplingParams(top_k=1, top_p=1e-6, min_p=1.0, temperature=1e-3)
    assert (
        sample_rows(logits, [strict, SamplingParams(), SamplingParams(top_p=1e-6)], [1, 2, 3], [0, 1, 2])
        == [17] * 3
    )
