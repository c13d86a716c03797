# SPDX-License-Identifier: Apache-2.0
"""Steps with few prompt tokens and a long context use the graphs that split contexts, and no others do."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mizzen.core.step_plan import PageWrites, PrefillChunk, StepPlan
from mizzen.engine.execution.prefill_graphs import LONG_CONTEXT, SplitSizes, select_size, token_sizes

SIZES = token_sizes(1280)
HEADS = 32


def make_plan(decodes: int, *chunks: tuple[int, int]) -> StepPlan:
    """Return a plan with `decodes` decodes and chunks (start, number of tokens)."""
    return StepPlan(
        step=1,
        decode=np.arange(decodes, dtype=np.int32),
        decode_version=1,
        pages=PageWrites(),
        prefill=tuple(
            PrefillChunk(slot=decodes + i, start=start, tokens=np.zeros(count, np.int32), last=True)
            for i, (start, count) in enumerate(chunks)
        ),
    )


@pytest.mark.parametrize(
    ("decodes", "chunks", "size"),
    [
        (0, [(8192, 64)], 64),
        (0, [(8192, 65)], 96),
        (32, [(8192, 64)], 96),
        (100, [(8192, 260)], 384),
        (0, [(0, 20), (8192, 20)], 64),  # one long context is enough
        (0, [(LONG_CONTEXT - 64, 64)], None),  # contexts are short
        (0, [(8192, 264)], None),  # prompt tokens keep the GPU busy
        (200, [(8192, 250)], None),  # the step is larger than the largest of these graphs
        (0, [(8192, 20)] * 3, None),  # too many chunks
    ],
)
def test_few_prompt_tokens_with_long_contexts_are_split(
    decodes: int, chunks: list[tuple[int, int]], size: int | None
) -> None:
    rule = SplitSizes.choose(SIZES, HEADS, 40_960)
    tokens = decodes + sum(count for _, count in chunks)
    assert rule.select(make_plan(decodes, *chunks), tokens) == size


def test_sizes_are_few_and_end_before_large_steps() -> None:
    rule = SplitSizes.choose(SIZES, HEADS, 40_960)
    assert rule.sizes == [32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384]
    assert rule.max_prompt_tokens == 264


def test_no_graph_splits_contexts_that_cannot_be_long() -> None:
    rule = SplitSizes.choose(SIZES, HEADS, LONG_CONTEXT)
    assert rule.sizes == [] and rule.select(make_plan(0, (2000, 48)), 48) is None


def test_the_smallest_sufficient_size_is_chosen() -> None:
    for smaller, larger in pairwise(SIZES):
        assert select_size(SIZES, smaller + 1) == select_size(SIZES, larger) == larger
