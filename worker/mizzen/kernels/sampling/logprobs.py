"""Log probabilities of rows of logits in two kernels: of what was drawn, of the most probable tokens, by id.

The vocabulary is read once, in blocks. Each yields its highest logit, the sum of its weights, and the highest
logit of each of its runs of `RUN` tokens. The most probable k tokens of a row stand in its k runs with the
highest logits, equal ones in the vocabulary's order: before each token of any other run come k tokens, one of
each of these. So one program a row picks k can_compile, and then k tokens out of them alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mizzen.kernels.sampling.sample import Processing
from mizzen.kernels.sampling.penalties import penalized

BLOCK = 4096
RUN = 64
MOST = 32
"""Tokens that can be picked, a power of two above `mizzen.core.sampling_params.MAX_LOGPROBS`."""

_FLOOR = tl.constexpr(-9999.0)
"""As `mizzen.engine.sampling.logprobs.FLOOR`."""
_LAST = tl.constexpr(0x7FFFFFFF)
_GONE = tl.constexpr(-(1 << 63))
"""Below every key."""
_COLUMNS = tl.constexpr(5)
"""Of `wanted`: out, source, row, slot, top."""


@triton.jit
def _key(value, index):
    """Return int64 that orders by logit (float32), and equal ones by index (int32), the lowest highest."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # one zero, not two
    rising = bits ^ ((bits >> 31) & _LAST)
    return (rising.to(tl.int64) << 32) | (index ^ _LAST).to(tl.int64)


@triton.jit
def _index_of(key):
    return key.to(tl.int32) ^ _LAST


@triton.jit
def _value_of(key):
    rising = (key >> 32).to(tl.int32)
    return (rising ^ ((rising >> 31) & _LAST)).to(tl.float32, bitcast=True)


@triton.jit
def _told(value, total):
    """Return the bits of log probabilities; what cannot be drawn, and what is no number, has the least."""
    value -= total
    return tl.where(value > _FLOOR, value, _FLOOR).to(tl.int32, bitcast=True)


@triton.jit
def _final(
    logits, source, slot, token, index, inside, vocab, places, penalties, counts, PENALTIES: tl.constexpr
):  # fmt: skip
    """Return the float32 logits that a row drew `token` from; -inf where it is not `inside`."""
    value = tl.load(logits + source * vocab + index, inside, float("-inf")).to(tl.float32)
    if PENALTIES:
        place = tl.load(places + slot)
        place = tl.where(place < -1, -2 - place, place)  # these rows were drawn again
        if place >= 0:
            table = tl.load(counts).to(tl.pointer_type(tl.int32))
            seen = tl.load(table + place * vocab + index, inside, 0)
            seen -= (inside & (index == token)).to(tl.int32)  # which its draw has counted
            of = penalties + 3 * slot
            value = penalized(value, seen, tl.load(of), tl.load(of + 1), tl.load(of + 2))
    return value


@triton.jit
def _scan_kernel(
    logits, wanted, tokens, highest, sums, can_compile, places, penalties, counts, vocab,
    PENALTIES: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    number, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ask = wanted + number * _COLUMNS
    source = tl.load(ask + 1).to(tl.int64)
    if source >= 0:
        token, slot = tl.load(tokens + tl.load(ask + 2)), tl.load(ask + 3).to(tl.int64)
        index = block * BLOCK + tl.arange(0, BLOCK)
        value = _final(
            logits, source, slot, token, index, index < vocab, vocab, places, penalties, counts, PENALTIES
        )
        top = tl.max(value, 0)
        out = number * tl.num_programs(1) + block
        tl.store(highest + out, top)
        # A block of -inf alone weighs nothing.
        tl.store(sums + out, tl.sum(tl.exp(value - tl.where(top == float("-inf"), 0.0, top)), 0))
        best = tl.max(tl.reshape(value, [BLOCK // RUN, RUN]), 1)
        tl.store(runs + out * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN), best)


@triton.jit
def _total(highest, sums, blocks, BLOCKS: tl.constexpr):
    """Return the logarithm of the sum of a row's weights."""
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    tops = tl.load(highest + block, inside, float("-inf"))
    top = tl.max(tops, 0)
    return top + tl.log(tl.sum(tl.load(sums + block, inside, 0.0) * tl.exp(tops - top), 0))


@triton.jit(do_not_specialize=["width", "named"])
def _select_kernel(
    logits, wanted, tokens, by_id, out, highest, sums, can_compile, places, penalties, counts, vocab, blocks, width,
    named, PENALTIES: tl.constexpr, BLOCKS: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr,
    RUN: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    ask = wanted + number * _COLUMNS
    source = tl.load(ask + 1).to(tl.int64)
    if source >= 0:
        token, slot = tl.load(tokens + tl.load(ask + 2)), tl.load(ask + 3).to(tl.int64)
        place, top = tl.load(ask).to(tl.int64), tl.minimum(tl.load(ask + 4), vocab)
        ids, values = out + place * 2 * width, out + (place * 2 + 1) * width
        total = _total(highest + number * blocks, sums + number * blocks, blocks, BLOCKS)
        drawn = _final(
            logits, source, slot, token, token, token < vocab, vocab, places, penalties, counts, PENALTIES
        )
        tl.store(ids, token.to(tl.int32))
        tl.store(values, _told(drawn, total))

        rank = tl.arange(0, MOST)
        index, count = tl.arange(0, RUNS), blocks * (BLOCK // RUN)
        highs = tl.load(runs + number * count + index, index < count, float("-inf"))
        keys = tl.where(index < count, _key(highs, index), _GONE)
        picked = tl.zeros([MOST], tl.int32)
        for k in range(top):
            best = tl.max(keys, 0)
            picked = tl.where(rank == k, _index_of(best), picked)
            keys = tl.where(keys == best, _GONE, keys)

        index = tl.reshape(picked[:, None] * RUN + tl.arange(0, RUN)[None, :], [MOST * RUN])
        inside = (index < vocab) & (tl.arange(0, MOST * RUN) < top * RUN)
        value = _final(
            logits, source, slot, token, index, inside, vocab, places, penalties, counts, PENALTIES
        )
        keys = tl.where(inside, _key(value, index), _GONE)
        chosen = tl.zeros([MOST], tl.int64)
        for k in range(top):
            best = tl.max(keys, 0)
            chosen = tl.where(rank == k, best, chosen)
            keys = tl.where(keys == best, _GONE, keys)
        tl.store(ids + 1 + rank, _index_of(chosen), rank < top)
        tl.store(values + 1 + rank, _told(_value_of(chosen), total), rank < top)

        for begin in range(0, named, MOST):
            column = begin + rank
            asked = column < named
            name = tl.load(by_id + place * named + column, asked, 0).to(tl.int32)
            logit = _final(
                logits, source, slot, token, name, asked, vocab, places, penalties, counts, PENALTIES
            )
            at = width - named + column
            tl.store(ids + at, name, asked)
            tl.store(values + at, _told(logit, total), asked)


def write_logprobs(
    logits: torch.Tensor,
    wanted: torch.Tensor,
    tokens: torch.Tensor,
    out: torch.Tensor,
    by_id: torch.Tensor | None = None,
    processing: Processing | None = None,
) -> None:
    """Write log probabilities of rows into a table; equal ones are ranked by id.

    Args:
        logits: [any, vocab], contiguous.
        wanted: int32 [n, 5], contiguous: the row of `out`, of `logits` (-1: nothing is wanted) and of
            `tokens`, the slot, and how many of the most probable tokens, at most `MOST`.
        tokens: int64 [any], what was drawn.
        out: int32 [any, 2, m], contiguous: ids and the bits of float32 log probabilities; the token's own,
            the most probable ones', as far as they are wanted, and in the last columns those by id.
        by_id: int64 [rows of `out`, any], contiguous.
        processing: Slots that have a place are penalised; what they drew is counted already.
    """
    count, vocab = len(wanted), logits.shape[1]
    blocks = triton.cdiv(vocab, BLOCK)
    highest = torch.empty((count, blocks), dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(highest)  # each aligned, so that all counts run the same kernels
    runs = torch.empty((count, blocks * (BLOCK // RUN)), dtype=torch.float32, device=logits.device)
    if processing is None:
        penalties = (logits,) * 3
    else:
        penalties = (processing.places, processing.values, processing.counts)
    named = (tokens, 0) if by_id is None else (by_id, by_id.shape[1])
    flags = {"PENALTIES": processing is not None, "BLOCK": BLOCK, "RUN": RUN, "num_warps": 8}
    _scan_kernel[(count, blocks)](
        logits, wanted, tokens, highest, sums, can_compile, *penalties, vocab, **flags
    )  # fmt: skip
    _select_kernel[(count,)](
        logits, wanted, tokens, named[0], out, highest, sums, can_compile, *penalties, vocab, blocks, out.shape[2],
        named[1], BLOCKS=triton.next_power_of_2(blocks), RUNS=triton.next_power_of_2(runs.shape[1]),
        MOST=MOST, **flags,
    )  # fmt: skip
