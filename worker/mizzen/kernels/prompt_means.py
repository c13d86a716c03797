# SPDX-License-Identifier: Apache-2.0
"""Mean of the hidden states of each prompt of a batch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 32, 128
"""Tiling: numbers of tokens and of columns that a program reads at once."""


@triton.jit
def _mean_kernel(hidden, ends, out, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    prompt = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    begin = tl.load(ends + prompt - 1, prompt > 0, 0)
    end = tl.load(ends + prompt)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        at = hidden + row[:, None] * size + column[None, :]
        sums += tl.load(at, (row < end)[:, None] & inside[None, :], 0.0).to(tl.float32)
    tl.store(out + prompt * size + column, tl.sum(sums, 0) / (end - begin), inside)


def mean_prompts(hidden: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the mean over the rows of each prompt, float32 [prompts, size].

    Args:
        hidden: Hidden states of all prompts, one after the other, [tokens, size], contiguous.
        ends: Index after the last row of each prompt, int64 [prompts], ascending; no prompt is empty.
    """
    size = hidden.shape[1]
    out = torch.empty(len(ends), size, dtype=torch.float32, device=hidden.device)
    _mean_kernel[(len(ends), triton.cdiv(size, COLUMNS))](hidden, ends, out, size, ROWS=ROWS, COLUMNS=COLUMNS)
    return out
