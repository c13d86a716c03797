"""Penalties of repeated tokens in one pass over counts and logits."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

BLOCK = 4096

_OUTPUT = tl.constexpr((1 << 30) - 1)
"""The bits of a count that are the output's; see `mizzen.engine.sampling.logits_params.PROMPT`."""


class Penalties(Protocol):
    """Rows and their penalties, [n] on the device; see `mizzen.engine.sampling.logits_params.BatchPenalties`."""

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
def penalized(value, seen, frequency, presence, repetition):
    """Return logits of tokens that were seen so often (a `TokenCounts` word each), in float32."""
    value = tl.where(seen != 0, tl.where(value > 0, value / repetition, value * repetition), value)
    output = seen & _OUTPUT
    return value - frequency * output.to(tl.float32) - presence * (output > 0).to(tl.float32)


@triton.jit
def _penalize_kernel(
    logits, rows, places, counts, frequencies, presences, repetitions, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    number = tl.program_id(0)
    row, place = tl.load(rows + number).to(tl.int64), tl.load(places + number).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = tl.load(counts + place * vocab + index, index < vocab, 0)
    # Few tokens of a vocabulary are ever seen: only their logits are touched.
    touched = seen != 0
    value = tl.load(logits + row * vocab + index, touched, 0.0)
    frequency, presence = tl.load(frequencies + number), tl.load(presences + number)
    value = penalized(value, seen, frequency, presence, tl.load(repetitions + number))
    tl.store(logits + row * vocab + index, value, touched)


def penalize(logits: torch.Tensor, penalties: Penalties, counts: torch.Tensor) -> None:
    """Penalise rows of logits (float32 [rows, vocab], contiguous) in place; `counts` are int32 [n, vocab]."""
    vocab = logits.shape[1]
    _penalize_kernel[(len(penalties.rows), triton.cdiv(vocab, BLOCK))](
        logits, penalties.rows, penalties.count_rows, counts, penalties.frequency, penalties.presence,
        penalties.repetition, vocab, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
