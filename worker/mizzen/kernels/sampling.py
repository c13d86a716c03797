"""Draws tokens from logits in two passes: greedy rows and rows at a temperature, without filters.

The numbers are those of `mizzen.engine.sampler`: the first token, in the vocabulary's order, at which the sum
of weights exceeds a random share of their total. Weights are summed by blocks of the vocabulary, each in
float32, and over blocks and within the chosen one in float64; the order of sums depends on the vocabulary
alone, so that a row's token is the same in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(x):
    """SplitMix64's finaliser, as `mizzen.engine.random.mix`."""
    x = (x ^ (x >> 30)) * tl.full((), _MIX_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), _MIX_2, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """float64 in [0, 1), as `mizzen.engine.random.uniform`."""
    golden = tl.full((), _GOLDEN, tl.uint64)
    bits = _mix(_mix(seed.to(tl.uint64) + golden) + position.to(tl.uint64) * golden)
    return (bits >> 12).to(tl.int64).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _scaled(logits, row, vocab, index, temperature):
    value = tl.load(logits + row * vocab + index, index < vocab, float("-inf")).to(tl.float32)
    return value / temperature


@triton.jit
def _block_kernel(logits, slots, temperatures, highest, best, sums, vocab, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + tl.load(slots + row))
    temperature = tl.where(temperature > 0, temperature, 1.0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    value = _scaled(logits, row, vocab, index, temperature)
    top = tl.max(value, 0)
    out = row * tl.num_programs(1) + block
    tl.store(highest + out, top)
    tl.store(best + out, tl.min(tl.where(value == top, index, vocab - 1), 0))
    # A block of -inf alone weighs nothing.
    weights = tl.exp(value - tl.where(top == float("-inf"), 0.0, top))
    tl.store(sums + out, tl.sum(tl.where(index < vocab, weights, 0.0), 0))


@triton.jit
def _draw_kernel(
    logits, slots, positions, temperatures, seeds, highest, best, sums, tokens, last_tokens, vocab, blocks,
    scratch, ADVANCE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row)
    temperature = tl.load(temperatures + slot)
    index = tl.arange(0, BLOCKS)
    inside = index < blocks
    tops = tl.load(highest + row * blocks + index, inside, float("-inf"))
    top = tl.max(tops, 0)
    if temperature > 0:
        parts = tl.load(sums + row * blocks + index, inside, 0.0) * tl.exp(tops - top)
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
        weights = tl.exp(_scaled(logits, row, vocab, place, temperature) - top).to(tl.float64)
        weights = tl.where(place < vocab, weights, 0.0)
        reached = before + tl.cumsum(weights, 0) > share
        last = tl.max(tl.where(weights > 0, place, 0), 0)
        token = tl.minimum(tl.min(tl.where(reached & (weights > 0), place, vocab), 0), last)
    else:
        choices = tl.load(best + row * blocks + index, inside, 0)
        token = tl.min(tl.where(inside & (tops == top), choices, vocab - 1), 0)
    token = token.to(tl.int64)
    tl.store(tokens + row, token)
    if ADVANCE:
        tl.store(last_tokens + slot, token)
        tl.store(positions + row, tl.where(slot == scratch, position, position + 1))


def _run(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    tokens: torch.Tensor,
    last_tokens: torch.Tensor | None,
    scratch: int,
) -> torch.Tensor:
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    highest, sums = torch.empty((2, rows, blocks), dtype=torch.float32, device=logits.device)
    best = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    _block_kernel[(rows, blocks)](
        logits, slots, temperatures, highest, best, sums, vocab, BLOCK=BLOCK, num_warps=8
    )
    _draw_kernel[(rows,)](
        logits, slots, positions, temperatures, seeds, highest, best, sums, tokens,
        tokens if last_tokens is None else last_tokens, vocab, blocks, scratch,
        ADVANCE=last_tokens is not None, BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(blocks), num_warps=8,
    )  # fmt: skip
    return tokens


def draw(
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
    return _run(logits, slots, positions, temperatures, seeds, tokens, None, -1)


def draw_and_advance(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    tokens: torch.Tensor,
    last_tokens: torch.Tensor,
    scratch: int,
) -> None:
    """Draw the token behind each row's position into `tokens` (int64 [rows]) and `last_tokens` (by slot).

    Advances the positions, but not those of the slot `scratch`: its rows are padding.
    """
    _run(logits, slots, positions, temperatures, seeds, tokens, last_tokens, scratch)
