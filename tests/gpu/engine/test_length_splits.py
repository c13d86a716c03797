# SPDX-License-Identifier: Apache-2.0
"""Captured steps with length-aware splits sample the same tokens as eager steps, even for uneven contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hopper import WITH_FA3
from small_models import VOCABULARY

from mizzen import LLM, SamplingParams
from mizzen.core.request import Int32
from mizzen.engine.execution import length_splits
from mizzen.engine.execution.length_splits import LengthSplitGraphs
from mizzen.engine.loading import warmup

pytestmark = WITH_FA3
ROWS, OUTPUT = 40, 24
GREEDY: list[dict[str, Any]] = [{"temperature": 0}]
KINDS: list[dict[str, Any]] = [
    *GREEDY,
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "top_k": 20, "frequency_penalty": 0.4},
    {"temperature": 0, "repetition_penalty": 1.2},
]


@pytest.fixture
def captured_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """List that receives, for each captured step, its number of rows and the size of its length-aware graph.

    The size is None if the step does not use such a graph.
    """
    results: list[tuple[int, int | None]] = []
    size_for = LengthSplitGraphs.size_for

    def record(self: LengthSplitGraphs, size: int, lengths: Int32) -> int | None:
        results.append((len(lengths), size_for(self, size, lengths)))
        return results[-1][1]

    monkeypatch.setattr(LengthSplitGraphs, "size_for", record)
    return results


def answers(folder: Path, context: int, kinds: list[dict[str, Any]], **options: Any) -> list[list[int]]:
    """Decode one prompt of `context` tokens together with many short ones; return the output tokens."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, VOCABULARY, n).tolist() for n in (context, *rng.integers(1, 40, ROWS - 1))]
    params = [
        SamplingParams(**kinds[i % len(kinds)], seed=i, max_tokens=OUTPUT - i % 5, ignore_eos=True)
        for i in range(ROWS)
    ]
    settings = {"kv_cache_tokens": 8192, "max_running_requests": ROWS, "cuda_graph_max_tokens": 0, **options}
    with LLM(folder, device="cuda", skip_tokenizer=True, check_integrity=True, **settings) as llm:
        results = llm.generate(prompts, params)
    return [answer.token_ids for answer in results]


def fraction_of_equal_tokens(answers_by_tokens: list[list[int]], reference: list[list[int]]) -> float:
    """Return the fraction of tokens that precede the first difference between an answer and its reference.

    Contexts that are split differently round differently, and so do GEMMs of padded batches: a near tie may
    flip, and then all later tokens differ.
    """
    equal_tokens = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(answers_by_tokens, reference, strict=True)
    ]
    return sum(equal_tokens) / sum(len(x) for x in answers_by_tokens)


def test_a_long_context_uses_length_aware_graphs(
    folder: Path, captured_steps: list[tuple[int, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without padding, GEMMs have the same shapes as in eager steps.
    monkeypatch.setattr(warmup, "batch_sizes", lambda largest: list(range(1, largest + 1)))
    monkeypatch.setattr(length_splits, "length_split_sizes", lambda sizes: sizes)
    eager = answers(folder, 900, GREEDY, cuda_graph="off")
    assert not captured_steps
    captured = answers(folder, 900, GREEDY)
    full = [size for rows, size in captured_steps if rows == ROWS]
    assert full and set(full) == {ROWS}
    assert fraction_of_equal_tokens(captured, eager) > 0.8


def test_padded_batches_equal_eager_steps(folder: Path, captured_steps: list[tuple[int, int | None]]) -> None:
    eager = answers(folder, 900, KINDS, cuda_graph="off")
    captured = answers(folder, 900, KINDS, max_running_requests=64)
    assert {size for rows, size in captured_steps if 32 < rows <= ROWS} == {48}
    assert fraction_of_equal_tokens(captured, eager) > 0.7


def test_a_growing_context_switches_graphs_within_its_batch(
    folder: Path, captured_steps: list[tuple[int, int | None]]
) -> None:
    # Contexts above 512 tokens use length-aware splits here; the long context grows from 501 to 519 tokens.
    eager = answers(folder, 500, GREEDY, cuda_graph="off")
    captured = answers(folder, 500, GREEDY)
    full = [size for rows, size in captured_steps if rows == ROWS]
    assert full[0] is None and full[-1] == ROWS and full == sorted(full, key=bool)
    assert fraction_of_equal_tokens(captured, eager) > 0.7


def test_similar_contexts_use_plain_graphs(
    folder: Path, captured_steps: list[tuple[int, int | None]]
) -> None:
    answers(folder, 100, GREEDY)
    assert captured_steps and {size for _, size in captured_steps} == {None}
