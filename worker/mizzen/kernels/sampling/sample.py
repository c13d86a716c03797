"""Draws tokens from logits in two passes: greedy rows and rows at a temperature, without filters.

The numbers are those of `mizzen.engine.sampling.sampler`: the first token, in the vocabulary's order, at which the sum
of weights exceeds a random share of their total. Weights are summed by blocks of the vocabulary, each in
float32, and over blocks and within the chosen one in float64; the order of sums depends on the vocabulary
alone, so that a row's token is the same in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

from mizzen.kernels.sampling.penalties import penalized

BLOCK = 4096

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(x):
    """SplitMix64's finaliser, as `mizzen.engine.sampling.rng.mix`."""
    x = (x ^ (x >> 30)) * tl.full((), _MIX_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), _MIX_2, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """float64 in [0, 1), as `mizzen.engine.sampling.rng.uniform`."""
    golden = tl.full((), _GOLDEN, tl.uint64)
    bits = _mix(_mix(seed.to(tl.uint64) + golden) + position.to(tl.uint64) * golden)
    return (bits >> 12).to(tl.int64).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _scaled(
    logits, row, slot, vocab, index, temperature, places, penalties, counts, bits, words,
    PENALTIES: tl.constexpr, MASKS: tl.constexpr,
):  # fmt: skip
    """Return float32 logits over the temperature, processed first as `Processing` says."""
    inside = index < vocab
    value = tl.load(logits + row * vocab + index, inside, float("-inf")).to(tl.float32)
    if PENALTIES:
        place = tl.load(places + slot)
        if MASKS:  # these rows are drawn here alone
            place = -2 - place
        if place >= 0:
            table = tl.load(counts).to(tl.pointer_type(tl.int32))
            seen = tl.load(table + place * vocab + index, inside, 0)
            of = penalties + 3 * slot
            value = penalized(value, seen, tl.load(of), tl.load(of + 1), tl.load(of + 2))
    if MASKS:
        word = tl.load(bits + slot * words + index // 32, inside, 0)
        value = tl.where(((word >> (index % 32)) & 1) == 1, value, float("-inf"))
    return value / temperature


@triton.jit
def _block_kernel(
    logits, rows, slots, temperatures, highest, best, sums, places, penalties, counts, bits, words, vocab,
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
        logits, row, slot, vocab, index, temperature, places, penalties, counts, bits, words, PENALTIES, MASKS
    )
    top = tl.max(value, 0)
    out = number * tl.num_programs(1) + block
    tl.store(highest + out, top)
    tl.store(best + out, tl.min(tl.where(value == top, index, vocab - 1), 0))
    # A block of -inf alone weighs nothing.
    weights = tl.exp(value - tl.where(top == float("-inf"), 0.0, top))
    tl.store(sums + out, tl.sum(tl.where(index < vocab, weights, 0.0), 0))


@triton.jit
def _draw_kernel(
    logits, rows, slots, positions, temperatures, seeds, highest, best, sums, tokens, last_tokens, places,
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
        drawn = position.to(tl.int64)
        if ADVANCE:
            drawn += 1
        share = _uniform(tl.load(seeds + slot), drawn) * total
        # The last block with any weight takes what rounding leaves over.
        last = tl.max(tl.where(parts > 0, index, 0), 0)
        block = tl.minimum(tl.min(tl.where(inside & (until > share), index, BLOCKS), 0), last)
        before = tl.sum(tl.where(index == block, until - parts, 0.0), 0)
        place = block * BLOCK + tl.arange(0, BLOCK)
        value = _scaled(
            logits,
            row,
            slot,
            vocab,
            place,
            temperature,
            places,
            penalties,
            counts,
            bits,
            words,
            PENALTIES,
            MASKS,
        )
        weights = tl.exp(value - top).to(tl.float64)
        weights = tl.where(place < vocab, weights, 0.0)
        reached = before + tl.cumsum(weights, 0) > share
        last = tl.max(tl.where(weights > 0, place, 0), 0)
        token = tl.minimum(tl.min(tl.where(reached & (weights > 0), place, vocab), 0), last)
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
        kept = tl.load(places + slot)
        if MASKS:
            kept = -2 - kept
        if kept >= 0:
            cell = tl.load(counts).to(tl.pointer_type(tl.int32)) + kept * vocab + token
            tl.store(cell, tl.load(cell) + 1)


class Processing(Protocol):
    """Which slots' logits are penalised, and how; see `mizzen.engine.sampling.graph_penalties.GraphPenalties`."""

    @property
    def places(self) -> torch.Tensor:
        """int64 [slots]: the row of counts of a slot that is drawn with all others; -1 for none.

        -2 - row for a slot that is drawn again, by `sample_masked` or `mizzen.kernels.sampling.top_k_top_p.sample_top_k_top_p`.
        """
        ...

    @property
    def values(self) -> torch.Tensor:
        """float32 [slots, 3]: frequency, presence, repetition."""
        ...

    @property
    def counts(self) -> torch.Tensor:
        """int64 [1]: the address of the counts, int32 [rows, vocab]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """The operands of one draw; where a row or a slot has none, whatever is at hand."""

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
    processing: Processing | None = None

    def __call__(self) -> torch.Tensor:
        """Enqueue it; return the tokens."""
        logits, wish, bits = self.logits, self.processing, self.bits
        count, vocab = len(logits) if self.rows is None else len(self.rows), logits.shape[1]
        blocks = triton.cdiv(vocab, BLOCK)
        highest = torch.empty((count, blocks), dtype=torch.float32, device=logits.device)
        sums = torch.empty_like(highest)  # each aligned, so that all counts run the same kernels
        best = torch.empty((count, blocks), dtype=torch.int32, device=logits.device)
        rows = logits if self.rows is None else self.rows
        penalties = (logits,) * 3 if wish is None else (wish.places, wish.values, wish.counts)
        masks = (logits, 0) if bits is None else (bits, bits.shape[1])
        flags = {"PENALTIES": wish is not None, "MASKS": bits is not None, "BLOCK": BLOCK, "num_warps": 8}
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
        _draw_kernel[(count,)](
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
    """Draw one token a row: logits [rows, vocab] (contiguous) → int64 [rows].

    `slots` [rows] index `temperatures` (float32; 0 is greedy) and `seeds` (int64); `positions` [rows] are the
    sequence positions of the tokens to be drawn.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    return _Draw(
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
    processing: Processing | None = None,
) -> None:
    """Draw the token behind each row's position into `tokens` (int64 [rows]) and `last_tokens` (by slot).

    Advances the positions, but not those of the slot `scratch`: its rows are padding. With `processing`,
    slots that have a place are penalised first, and what they draw is counted.
    """
    _Draw(
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
    processing: Processing,
) -> None:
    """Draw some rows of a batch again, into `tokens` and `last_tokens`, from what masks allow.

    Args:
        logits: The model's, [all rows, vocab], contiguous.
        rows: int64 [n], which rows.
        slots: [all rows].
        positions: [all rows], the sequence positions of the tokens to be drawn.
        temperatures: float32, by slot.
        seeds: int64, by slot.
        tokens: int64 [all rows].
        last_tokens: int64, by slot.
        bits: int32 [any, ceil(vocab / 32)], by slot: bit t % 32 of word t // 32 allows token t.
        processing: Slots whose place is below -1 are penalised before, and what they draw is counted.
    """
    _Draw(
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
