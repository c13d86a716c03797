# SPDX-License-Identifier: Apache-2.0
"""Inputs of an encoder's graph: a batch of prompts, then one prompt of padding, then empty prompts."""

from __future__ import annotations

import numpy as np
import pytest

from mizzen.engine.encoders.graphs import EncoderInputs


@pytest.mark.parametrize(
    ("tokens", "prompts"),
    [(4, 4), (16, 16), (384, 16), (16384, 512)],
)
def test_large_graphs_have_a_prompt_for_every_32_tokens(tokens: int, prompts: int) -> None:
    assert EncoderInputs.for_tokens(tokens).prompts == prompts


@pytest.mark.parametrize("lengths", [[], [1], [3, 5, 2], [1] * 10, [16]])
def test_batches_are_padded_by_one_prompt_and_empty_ones(lengths: list[int]) -> None:
    inputs = EncoderInputs(tokens=16, prompts=10)
    buffer = np.full(inputs.size, -7, np.int32)
    count = sum(lengths)
    ids, positions = np.arange(count) + 100, np.arange(count) % 5
    inputs.pack(buffer, [ids, positions], np.array(lengths, np.int64))
    *sections, begins = np.split(buffer, np.cumsum(inputs.section_sizes)[:-1])
    padding = [0] * (16 - count)
    assert [section.tolist() for section in sections] == [
        [*ids, *padding],
        [*positions, *padding],
        [0] * 16,  # token types
    ]
    sizes = np.diff(begins).tolist()
    assert begins[0] == 0
    assert sizes == [*lengths, 16 - count, *[0] * (10 - len(lengths))]
