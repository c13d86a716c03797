# SPDX-License-Identifier: Apache-2.0
"""Comparison of the engine's logits with those of Transformers, for any batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)


def check(kit: SimpleNamespace, folder: Path, model: Any, backend: str, **options: Any) -> None:
    """Compare logits with Transformers: whole, chunked and page-sharing prompts, and a mixed batch.

    `options` are engine options.
    """
    bench = kit.Bench(folder, backend, **options)
    first_prompt, second_prompt = kit.tokens(45, seed=1), kit.tokens(29, seed=2)
    reference = kit.oracle(model, first_prompt)
    assert reference.std() > 0.3

    assert_equal(bench.logits(bench.plan([], [(0, 0, first_prompt, True)], (kit.greedy(0),))), reference)

    starts = (kit.greedy(1),)
    for begin, end in ((0, 7), (7, 8), (8, 30), (30, 45)):
        actual = bench.logits(bench.plan([], [(1, begin, first_prompt[begin:end], end == 45)], starts))
        assert_equal(actual, reference[begin:end])
        starts = ()

    hit = bench.share(0, 2, 40)
    actual = bench.logits(bench.plan([], [(2, 40, first_prompt[40:], True)], (kit.greedy(2, 40),), (hit,)))
    assert_equal(actual, reference[40:])

    # Slot 0 decodes while slots 3 and 4 run prompt chunks; then slots 0 to 4 all decode.
    answers = {slot: kit.tokens(3, seed=10 + slot) for slot in range(5)}
    texts = {0: first_prompt, 1: first_prompt, 2: first_prompt, 3: second_prompt, 4: second_prompt[:10]}
    full = {slot: np.concatenate([text, answers[slot]]) for slot, text in texts.items()}
    expected = {slot: kit.oracle(model, text) for slot, text in full.items()}

    def feed(slots: list[int]) -> None:
        for slot in slots:
            bench.state.last_tokens[slot] = int(full[slot][bench.state.lengths[slot]])

    feed([0])
    actual = bench.logits(
        bench.plan(
            [0],
            [(3, 0, second_prompt[:20], False), (4, 0, second_prompt[:10], True)],
            (kit.greedy(3), kit.greedy(4)),
        )
    )
    assert_equal(actual, torch.cat([expected[0][45:46], expected[3][:20], expected[4][:10]]))
    actual = bench.logits(bench.plan([], [(3, 20, second_prompt[20:], True)]))
    assert_equal(actual, expected[3][20:29])
    for _ in range(2):
        slots = [4, 0, 2, 3, 1]
        feed(slots)
        lengths = [int(bench.state.lengths[slot]) for slot in slots]
        actual = bench.logits(bench.plan(slots, []))
        assert_equal(actual, torch.stack([expected[s][n] for s, n in zip(slots, lengths, strict=True)]))
