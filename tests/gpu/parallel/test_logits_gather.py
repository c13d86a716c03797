"""Logits that ranks write to rank 0's buffer equal gathered ones."""

from __future__ import annotations

from pathlib import Path

import logits_gather_kit
import pytest
import tensor_kit
from tensor_kit import RANKS

pytestmark = tensor_kit.several_gpus
ROWS = [1, 3, 32, 256]
EVEN = [8192, 151_936]
"""Products of our own serve the former; the latter is Qwen3's."""
PADDED = 1000
"""No multiple of 16: the last rank holds less than the others."""


@pytest.mark.parametrize("size", RANKS[:2])
@pytest.mark.parametrize("vocab", EVEN)
def test_placed_logits_equal_gathered_logits(vocab: int, size: int, tmp_path: Path) -> None:
    for results in logits_gather_kit.on_ranks(size, tmp_path, logits_gather_kit.logits, vocab, ROWS):
        assert results.placed
        assert all(results.right.values()), results.right


def test_padded_vocabularies_are_gathered(tmp_path: Path) -> None:
    for results in logits_gather_kit.on_ranks(2, tmp_path, logits_gather_kit.logits, PADDED, ROWS):
        assert not results.placed
        assert all(results.right.values()), results.right
