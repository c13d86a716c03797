"""Captured steps with very different contexts sample the tokens of eager steps, with length-aware splits."""

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
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """Rows of each captured step, and the size of its length-aware graph, or None."""
    results: list[tuple[int, int | None]] = []
    size_for = LengthSplitGraphs.size_for

    def noted(self: LengthSplitGraphs, size: int, lengths: Int32) -> int | None:
        results.append((len(lengths), size_for(self, size, lengths)))
        return results[-1][1]

    monkeypatch.setattr(LengthSplitGraphs, "size_for", noted)
    return results


def answers(folder: Path, long: int, kinds: list[dict[str, Any]], **options: Any) -> list[list[int]]:
    """Decode one prompt of `length` tokens and many short ones together."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, VOCABULARY, n).tolist() for n in (long, *rng.integers(1, 40, ROWS - 1))]
    params = [
        SamplingParams(**kinds[i % len(kinds)], seed=i, max_tokens=OUTPUT - i % 5, ignore_eos=True)
        for i in range(ROWS)
    ]
    settings = {"kv_cache_tokens": 8192, "max_running_requests": ROWS, "cuda_graph_max_tokens": 0, **options}
    with LLM(folder, device="cuda", skip_tokenizer=True, check_integrity=True, **settings) as llm:
        results = llm.generate(prompts, params)
    return [answer.token_ids for answer in results]


def alike(some: list[list[int]], others: list[list[int]]) -> float:
    """Return the fraction of tokens before the first difference.

    Contexts that are split differently round differently, and so do GEMMs of padded batches: a near tie may
    flip, and then all later tokens differ.
    """
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(some, others, strict=True)
    ]
    return sum(same) / sum(len(x) for x in some)


def test_a_long_context_uses_length_aware_graphs(
    folder: Path, taken: list[tuple[int, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without padding the shapes of products are the eager twin's.
    monkeypatch.setattr(warmup, "batch_sizes", lambda largest: list(range(1, largest + 1)))
    monkeypatch.setattr(length_splits, "length_split_sizes", lambda sizes: sizes)
    eager = answers(folder, 900, GREEDY, cuda_graph="off")
    assert not taken
    captured = answers(folder, 900, GREEDY)
    full = [size for rows, size in taken if rows == ROWS]
    assert full and set(full) == {ROWS}
    assert alike(captured, eager) > 0.8


def test_padded_batches_equal_eager_steps(folder: Path, taken: list[tuple[int, int | None]]) -> None:
    eager = answers(folder, 900, KINDS, cuda_graph="off")
    captured = answers(folder, 900, KINDS, max_running_requests=64)
    assert {size for rows, size in taken if 32 < rows <= ROWS} == {48}
    assert alike(captured, eager) > 0.7


def test_a_growing_context_switches_graphs_within_its_batch(
    folder: Path, taken: list[tuple[int, int | None]]
) -> None:
    # Beyond 512 tokens it is long here; all rows decode from 501 to 519 of them.
    eager = answers(folder, 500, GREEDY, cuda_graph="off")
    captured = answers(folder, 500, GREEDY)
    full = [size for rows, size in taken if rows == ROWS]
    assert full[0] is None and full[-1] == ROWS and full == sorted(full, key=bool)
    assert alike(captured, eager) > 0.7


def test_similar_contexts_use_plain_graphs(folder: Path, taken: list[tuple[int, int | None]]) -> None:
    answers(folder, 100, GREEDY)
    assert taken and {size for _, size in taken} == {None}
