"""Penalties of repeated tokens, applied in one pass over token counts and logits."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

BLOCK = 4096

_OUTPUT = tl.constexpr((1 << 30) - 1)
"""Bits of a count that count output tokens; see `mizzen.engine.sampling.logits_params.PROMPT`."""


class RowPenalties(Protocol):
    """Rows and their penalties, [n] each on the device."""

    @property
    def rows(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def count_rows(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def frequency(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def presence(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def repetition(self) -> torch.Tensor: ...  # noqa: D102


@triton.jit
def apply_penalties(value, seen, frequency, presence, repetition):
    """Return penalised logits in float32; `seen` holds the tokens' counts (a `TokenCounts` word each)."""
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
    """Penalise rows of logits (float32 [rows, vocab], contiguous) in place; `counts` are int32 [n, vocab]."""
    vocab = logits.shape[1]
    _penalize_kernel[(len(penalties.rows), triton.cdiv(vocab, BLOCK))](
        logits, penalties.rows, penalties.count_rows, counts, penalties.frequency, penalties.presence,
        penalties.repetition, vocab, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
