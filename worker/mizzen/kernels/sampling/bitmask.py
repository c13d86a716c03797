# SPDX-License-Identifier: Apache-2.0
"""Masks disallowed tokens in one pass over token bitmasks; logits of allowed tokens are not touched."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _mask_kernel(logits, rows, slots, bits, vocab, words, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row, slot = tl.load(rows + number).to(tl.int64), tl.load(slots + number).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocab
    word = tl.load(bits + slot * words + index // 32, inside, -1)
    banned = inside & (((word >> (index % 32)) & 1) == 0)
    tl.store(logits + row * vocab + index, tl.full((BLOCK,), float("-inf"), tl.float32), banned)


def mask_tokens(logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, bits: torch.Tensor) -> None:
    """Set the logits of disallowed tokens to -inf, in place.

    Args:
        logits: Logits, float32 [all rows, vocab], contiguous.
        rows: Rows of `logits` to mask, int64 [n].
        slots: Row of `bits` for each of these rows, int64 [n].
        bits: Masks, int32 [any, ceil(vocab / 32)], contiguous; bit t % 32 of word t // 32 allows token t.
    """
    vocab = logits.shape[1]
    _mask_kernel[(len(rows), triton.cdiv(vocab, BLOCK))](
        logits, rows, slots, bits, vocab, bits.shape[1], BLOCK=BLOCK, num_warps=8
    )
