# SPDX-License-Identifier: Apache-2.0
"""Samples tokens in two kernels, greedily or with a temperature, but without top-k, top-p and min-p.

The result equals that of `mizzen.engine.sampling.sampler`: the first token, in vocabulary order, at which the
running sum of weights exceeds a random fraction of their total. Weights are summed in float32 within blocks
of the vocabulary, and in float64 over blocks and within the chosen block. The order of summation depends only
on the vocabulary, so a row's token is the same in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

from mizzen.kernels.sampling.penalties import apply_penalties

BLOCK = 4096

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(x):
    """Apply the finaliser of SplitMix64 to x (uint64); equals `mizzen.engine.sampling.rng.mix`."""
    x = (x ^ (x >> 30)) * tl.full((), _MIX_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), _MIX_2, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """Return a uniform random float64 in [0, 1); equals `mizzen.engine.sampling.rng.uniform`."""
    golden = tl.full((), _GOLDEN, tl.uint64)
    bits = _mix(_mix(seed.to(tl.uint64) + golden) + position.to(tl.uint64) * golden)
    return (bits >> 12).to(tl.int64).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _scaled(
    logits, row, slot, vocab, index, temperature, count_rows, penalties, counts, bits, words,
    PENALTIES: tl.constexpr, MASKS: tl.constexpr,
):  # fmt: skip
    """Return float32 logits divided by the temperature, after penalties and masks were applied."""
    inside = index < vocab
    value = tl.load(logits + row * vocab + index, inside, float("-inf")).to(tl.float32)
    if PENALTIES:
        count_row = tl.load(count_rows + slot)
        if MASKS:  # rows with masks are resampled; their entries are encoded as -2 - row
            count_row = -2 - count_row
        if count_row >= 0:
            table = tl.load(counts).to(tl.pointer_type(tl.int32))
            seen = tl.load(table + count_row * vocab + index, inside, 0)
            penalty = penalties + 3 * slot
            value = apply_penalties(value, seen, tl.load(penalty), tl.load(penalty + 1), tl.load(penalty + 2))
    if MASKS:
        word = tl.load(bits + slot * words + index // 32, inside, 0)
        value = tl.where(((word >> (index % 32)) & 1) == 1, value, float("-inf"))
    return value / temperature


@triton.jit
def _block_kernel(
    logits, rows, slots, temperatures, highest, best, sums, count_rows, penalties, counts, bits, words, vocab,
    PENALTIES: tl.constexpr, MASKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = number
    if MASKS:
        row = tl.load(rows + number)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    value = _scaled(
        logits,
        row,
        slot,
        vocab,
        index,
        temperature,
        count_rows,
        penalties,
        counts,
        bits,
        words,
        PENALTIES,
        MASKS,
    )
    top = tl.max(value, 0)
    out = number * tl.num_programs(1) + block
    tl.store(highest + out, top)
    tl.store(best + out, tl.min(tl.where(value == top, index, vocab - 1), 0))
    # If all logits of a block are -inf, its weights are zero.
    weights = tl.exp(value - tl.where(top == float("-inf"), 0.0, top))
    tl.store(sums + out, tl.sum(tl.where(index < vocab, weights, 0.0), 0))


@triton.jit
def _sample_kernel(
    logits, rows, slots, positions, temperatures, seeds, highest, best, sums, tokens, last_tokens, count_rows,
    penalties, counts, bits, words, vocab, blocks, scratch, ADVANCE: tl.constexpr, PENALTIES: tl.constexpr,
    MASKS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row = number
    if MASKS:
        row = tl.load(rows + number)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row)
    temperature = tl.load(temperatures + slot)
    index = tl.arange(0, BLOCKS)
    inside = index < blocks
    tops = tl.load(highest + number * blocks + index, inside, float("-inf"))
    top = tl.max(tops, 0)
    if temperature > 0:
        parts = tl.load(sums + number * blocks + index, inside, 0.0) * tl.exp(tops - top)
        parts = tl.where(inside, parts, 0.0).to(tl.float64)
        until = tl.cumsum(parts, 0)
        total = tl.sum(tl.where(index == blocks - 1, until, 0.0), 0)
        sampled_position = position.to(tl.int64)
        if ADVANCE:
            sampled_position += 1
        target = _uniform(tl.load(seeds + slot), sampled_position) * total
        # The last block with any weight absorbs rounding errors.
        last = tl.max(tl.where(parts > 0, index, 0), 0)
        block = tl.minimum(tl.min(tl.where(inside & (until > target), index, BLOCKS), 0), last)
        before = tl.sum(tl.where(index == block, until - parts, 0.0), 0)
        token_index = block * BLOCK + tl.arange(0, BLOCK)
        value = _scaled(
            logits,
            row,
            slot,
            vocab,
            token_index,
            temperature,
            count_rows,
            penalties,
            counts,
            bits,
            words,
            PENALTIES,
            MASKS,
        )
        weights = tl.exp(value - top).to(tl.float64)
        weights = tl.where(token_index < vocab, weights, 0.0)
        reached = before + tl.cumsum(weights, 0) > target
        last = tl.max(tl.where(weights > 0, token_index, 0), 0)
        token = tl.minimum(tl.min(tl.where(reached & (weights > 0), token_index, vocab), 0), last)
    else:
        choices = tl.load(best + number * blocks + index, inside, 0)
        token = tl.min(tl.where(inside & (tops == top), choices, vocab - 1), 0)
    token = token.to(tl.int64)
    tl.store(tokens + row, token)
    if ADVANCE or MASKS:
        tl.store(last_tokens + slot, token)
    if ADVANCE:
        tl.store(positions + row, tl.where(slot == scratch, position, position + 1))
    if PENALTIES:
        count_row = tl.load(count_rows + slot)
        if MASKS:
            count_row = -2 - count_row
        if count_row >= 0:
            cell = tl.load(counts).to(tl.pointer_type(tl.int32)) + count_row * vocab + token
            tl.store(cell, tl.load(cell) + 1)


class LogitsProcessing(Protocol):
    """Penalties and token counts by slot, on the device.

    `mizzen.engine.sampling.graph_penalties.GraphPenalties` implements it.
    """

    @property
    def count_rows(self) -> torch.Tensor:
        """Row of the token counts for each slot, int64 [slots]; -1 for slots without penalties.

        If a slot's token is sampled a second time, by `sample_masked` or
        `mizzen.kernels.sampling.top_k_top_p.sample_top_k_top_p`, its entry is `-2 - row` instead of `row`.
        Only the second sampling then applies penalties.
        """
        ...

    @property
    def values(self) -> torch.Tensor:
        """Frequency, presence and repetition penalty by slot, float32 [slots, 3]."""
        ...

    @property
    def counts(self) -> torch.Tensor:
        """Address of the token counts (int32 [rows, vocab]), int64 [1]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _SampleLaunch:
    """Arguments of one launch of the two sampling kernels, which `__call__` enqueues."""

    logits: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor
    tokens: torch.Tensor
    last_tokens: torch.Tensor | None = None
    scratch: int = -1
    advance: bool = False
    rows: torch.Tensor | None = None
    bits: torch.Tensor | None = None
    processing: LogitsProcessing | None = None

    def __call__(self) -> torch.Tensor:
        """Enqueue the kernels and return the tokens."""
        logits, processing, bits = self.logits, self.processing, self.bits
        count, vocab = len(logits) if self.rows is None else len(self.rows), logits.shape[1]
        blocks = triton.cdiv(vocab, BLOCK)
        highest = torch.empty((count, blocks), dtype=torch.float32, device=logits.device)
        sums = torch.empty_like(highest)  # aligned separately, so that all batch sizes run the same kernels
        best = torch.empty((count, blocks), dtype=torch.int32, device=logits.device)
        rows = logits if self.rows is None else self.rows
        penalties = (
            (logits,) * 3
            if processing is None
            else (processing.count_rows, processing.values, processing.counts)
        )
        masks = (logits, 0) if bits is None else (bits, bits.shape[1])
        flags = {
            "PENALTIES": processing is not None,
            "MASKS": bits is not None,
            "BLOCK": BLOCK,
            "num_warps": 8,
        }
        _block_kernel[(count, blocks)](
            logits,
            rows,
            self.slots,
            self.temperatures,
            highest,
            best,
            sums,
            *penalties,
            *masks,
            vocab,
            **flags,
        )
        _sample_kernel[(count,)](
            logits, rows, self.slots, self.positions, self.temperatures, self.seeds, highest, best, sums,
            self.tokens, self.tokens if self.last_tokens is None else self.last_tokens, *penalties, *masks,
            vocab, blocks, self.scratch, ADVANCE=self.advance, BLOCKS=triton.next_power_of_2(blocks), **flags,
        )  # fmt: skip
        return self.tokens


def sample_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
) -> torch.Tensor:
    """Sample one token per row of `logits`; return the tokens, int64 [rows].

    Args:
        logits: Logits [rows, vocab], contiguous.
        slots: Slot of each row, [rows].
        positions: Sequence position of each sampled token, [rows].
        temperatures: Temperatures by slot, float32; 0 means greedy.
        seeds: Seeds by slot, int64.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    return _SampleLaunch(
        logits=logits,
        slots=slots,
        positions=positions,
        temperatures=temperatures,
        seeds=seeds,
        tokens=tokens,
    )()


def sample_and_advance(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    tokens: torch.Tensor,
    last_tokens: torch.Tensor,
    scratch: int,
    processing: LogitsProcessing | None = None,
) -> None:
    """Sample each row's next token, and advance the row's position by one.

    Args:
        logits: Logits [rows, vocab], contiguous.
        slots: Slot of each row, [rows].
        positions: Sequence position of each row's input token, [rows]; advanced in place.
        temperatures: Temperatures by slot, float32; 0 means greedy.
        seeds: Seeds by slot, int64.
        tokens: Tensor for the sampled tokens, int64 [rows].
        last_tokens: Last tokens by slot, int64; updated in place.
        scratch: Slot of padding rows, whose positions are not advanced.
        processing: Penalties to apply, and token counts in which the sampled tokens are counted, for slots
            whose `count_rows` entry is at least 0.
    """
    _SampleLaunch(
        logits=logits,
        slots=slots,
        positions=positions,
        temperatures=temperatures,
        seeds=seeds,
        tokens=tokens,
        last_tokens=last_tokens,
        scratch=scratch,
        advance=True,
        processing=processing,
    )()


def sample_masked(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    tokens: torch.Tensor,
    last_tokens: torch.Tensor,
    bits: torch.Tensor,
    processing: LogitsProcessing,
) -> None:
    """Sample some rows of a batch again, this time only from the tokens that the rows' masks allow.

    Args:
        logits: Logits of the model, [all rows, vocab], contiguous.
        rows: Rows to resample, int64 [n].
        slots: Slot of each row of the batch, [all rows].
        positions: Sequence position of each sampled token, [all rows].
        temperatures: Temperatures by slot, float32; 0 means greedy.
        seeds: Seeds by slot, int64.
        tokens: Sampled tokens, int64 [all rows]; overwritten for `rows`.
        last_tokens: Last tokens by slot, int64; overwritten for the slots of `rows`.
        bits: Masks by slot, int32 [any, ceil(vocab / 32)]: bit t % 32 of word t // 32 allows token t.
        processing: Penalties to apply, and token counts in which the sampled tokens are counted, for slots
            whose `count_rows` entry is below -1.
    """
    _SampleLaunch(
        logits=logits,
        rows=rows,
        slots=slots,
        positions=positions,
        temperatures=temperatures,
        seeds=seeds,
        tokens=tokens,
        last_tokens=last_tokens,
        bits=bits,
        processing=processing,
    )()
