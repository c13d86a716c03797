# SPDX-License-Identifier: Apache-2.0
"""Applies penalties for repeated tokens in one pass over token counts and logits."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

BLOCK = 4096

_OUTPUT = tl.constexpr((1 << 30) - 1)
"""Mask of the bits of a token count that hold the number of occurrences in the output. The bit above them,
`mizzen.engine.sampling.token_counts.PROMPT_BIT`, says that the token occurs in the prompt."""


class RowPenalties(Protocol):
    """Rows of logits, their rows of token counts, and their penalties; all tensors are [n], on the device."""

    @property
    def rows(self) -> torch.Tensor:
        """Rows of the logits that have penalties, int64."""
        ...

    @property
    def count_rows(self) -> torch.Tensor:
        """Rows of the token counts, int64, one per row of logits."""
        ...

    @property
    def frequency(self) -> torch.Tensor:
        """Frequency penalties, float32."""
        ...

    @property
    def presence(self) -> torch.Tensor:
        """Presence penalties, float32."""
        ...

    @property
    def repetition(self) -> torch.Tensor:
        """Repetition penalties, float32."""
        ...


@triton.jit
def apply_penalties(value, seen, frequency, presence, repetition):
    """Return penalised logits in float32; `seen` holds int32 token counts, whose bits `_OUTPUT` explains."""
    value = tl.where(seen != 0, tl.where(value > 0, value / repetition, value * repetition), value)
    output = seen & _OUTPUT
    return value - frequency * output.to(tl.float32) - presence * (output > 0).to(tl.float32)


@triton.jit
def _penalize_kernel(
    logits, rows, count_rows, counts, frequencies, presences, repetitions, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    number = tl.program_id(0)
    row, count_row = tl.load(rows + number).to(tl.int64), tl.load(count_rows + number).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = tl.load(counts + count_row * vocab + index, index < vocab, 0)
    # Few tokens of a vocabulary ever occur: only their logits are touched.
    touched = seen != 0
    value = tl.load(logits + row * vocab + index, touched, 0.0)
    frequency, presence = tl.load(frequencies + number), tl.load(presences + number)
    value = apply_penalties(value, seen, frequency, presence, tl.load(repetitions + number))
    tl.store(logits + row * vocab + index, value, touched)


def penalize(logits: torch.Tensor, penalties: RowPenalties, counts: torch.Tensor) -> None:
    """Penalise rows of `logits` in place.

    Args:
        logits: Logits, float32 [rows, vocab], contiguous.
        penalties: Rows to penalise and their penalties.
        counts: Token counts, int32 [any, vocab], contiguous; `penalties.count_rows` selects rows of it.
    """
    vocab = logits.shape[1]
    _penalize_kernel[(len(penalties.rows), triton.cdiv(vocab, BLOCK))](
        logits, penalties.rows, penalties.count_rows, counts, penalties.frequency, penalties.presence,
        penalties.repetition, vocab, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
