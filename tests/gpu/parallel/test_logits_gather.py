# SPDX-License-Identifier: Apache-2.0
"""Logits that ranks write directly to rank 0's buffer equal gathered logits."""

from __future__ import annotations

from pathlib import Path

import logits_gather_kit
import pytest
import tensor_kit
from tensor_kit import RANKS

pytestmark = tensor_kit.several_gpus
ROWS = [1, 3, 32, 256]
EVEN = [8192, 151_936]
"""Vocabulary sizes that the ranks share evenly: one small enough for Mizzen's own GEMMs, and Qwen3's."""
PADDED = 1000
"""A vocabulary size that is not a multiple of 16, so the last rank's shard is padded."""


@pytest.mark.parametrize("size", RANKS[:2])
@pytest.mark.parametrize("vocab", EVEN)
def test_placed_logits_equal_gathered_logits(vocab: int, size: int, tmp_path: Path) -> None:
    for results in logits_gather_kit.on_ranks(size, tmp_path, logits_gather_kit.logits, vocab, ROWS):
        assert results.placed
        assert all(results.correct.values()), results.correct


def test_padded_vocabularies_are_gathered(tmp_path: Path) -> None:
    for results in logits_gather_kit.on_ranks(2, tmp_path, logits_gather_kit.logits, PADDED, ROWS):
        assert not results.placed
        assert all(results.correct.values()), results.correct
