# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of sampled tokens, of the most probable tokens and of given token ids, in two kernels.

The first kernel reads the vocabulary once, in blocks. Each block yields its highest logit, the sum of its
softmax weights, and the highest logit of each run of `RUN` consecutive tokens. The k most probable tokens of
a row lie in the k runs with the highest logits (ties in vocabulary order): any token outside these runs ranks
below k tokens, one in each of them. So the second kernel, with one program per row, first selects k runs, and
then k tokens from these runs only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mizzen.kernels.sampling.penalties import apply_penalties
from mizzen.kernels.sampling.sample import LogitsProcessing

BLOCK = 4096
RUN = 64
MAX_TOP = 32
"""Maximum number of most probable tokens; a power of two above `mizzen.core.sampling_params.MAX_LOGPROBS`."""

_FLOOR = tl.constexpr(-9999.0)
"""Lowest log probability that is reported; equals `mizzen.engine.sampling.side_outputs.LOGPROB_FLOOR`."""
_MAX_INT32 = tl.constexpr(0x7FFFFFFF)
_REMOVED = tl.constexpr(-(1 << 63))
"""Key of an entry that is out of range or already selected; lower than all other keys."""
_COLUMNS = tl.constexpr(5)
"""Number of entries in each line of `wanted`, an argument of `write_logprobs`."""


@triton.jit
def _key(value, index):
    """Return an int64 key that orders float32 logits; of equal logits, the lower index has the higher key."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # +0 and -0 have the same key
    rising = bits ^ ((bits >> 31) & _MAX_INT32)
    return (rising.to(tl.int64) << 32) | (index ^ _MAX_INT32).to(tl.int64)


@triton.jit
def _index_of(key):
    return key.to(tl.int32) ^ _MAX_INT32


@triton.jit
def _value_of(key):
    rising = (key >> 32).to(tl.int32)
    return (rising ^ ((rising >> 31) & _MAX_INT32)).to(tl.float32, bitcast=True)


@triton.jit
def _encode_logprob(value, total):
    """Return the bits of the log probabilities `value - total`; impossible tokens and NaN get the floor."""
    value -= total
    return tl.where(value > _FLOOR, value, _FLOOR).to(tl.int32, bitcast=True)


@triton.jit
def _final(
    logits, source, slot, token, index, inside, vocab, count_rows, penalties, counts, PENALTIES: tl.constexpr
):  # fmt: skip
    """Return a row's logits for the tokens `index`, in float32, as they were when `token` was sampled.

    Penalties are applied with the token counts from before that sampling. Where `inside` is false, the result
    is -inf.
    """
    value = tl.load(logits + source * vocab + index, inside, float("-inf")).to(tl.float32)
    if PENALTIES:
        count_row = tl.load(count_rows + slot)
        count_row = tl.where(count_row < -1, -2 - count_row, count_row)  # these rows were resampled
        if count_row >= 0:
            table = tl.load(counts).to(tl.pointer_type(tl.int32))
            seen = tl.load(table + count_row * vocab + index, inside, 0)
            seen -= (inside & (index == token)).to(tl.int32)  # sampling has already counted it
            penalty = penalties + 3 * slot
            value = apply_penalties(value, seen, tl.load(penalty), tl.load(penalty + 1), tl.load(penalty + 2))
    return value


@triton.jit
def _scan_kernel(
    logits, wanted, tokens, highest, sums, run_maxima, count_rows, penalties, counts, vocab,
    PENALTIES: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    number, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = wanted + number * _COLUMNS
    source = tl.load(request + 1).to(tl.int64)
    if source >= 0:
        token, slot = tl.load(tokens + tl.load(request + 2)), tl.load(request + 3).to(tl.int64)
        index = block * BLOCK + tl.arange(0, BLOCK)
        value = _final(
            logits, source, slot, token, index, index < vocab, vocab, count_rows, penalties, counts, PENALTIES
        )
        top = tl.max(value, 0)
        out = number * tl.num_programs(1) + block
        tl.store(highest + out, top)
        # If all logits of a block are -inf, its weights are zero.
        tl.store(sums + out, tl.sum(tl.exp(value - tl.where(top == float("-inf"), 0.0, top)), 0))
        best = tl.max(tl.reshape(value, [BLOCK // RUN, RUN]), 1)
        tl.store(run_maxima + out * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN), best)


@triton.jit
def _total(highest, sums, blocks, BLOCKS: tl.constexpr):
    """Return the logarithm of the sum of a row's softmax weights over all blocks."""
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    tops = tl.load(highest + block, inside, float("-inf"))
    top = tl.max(tops, 0)
    return top + tl.log(tl.sum(tl.load(sums + block, inside, 0.0) * tl.exp(tops - top), 0))


@triton.jit(do_not_specialize=["width", "ids_per_row"])
def _select_kernel(
    logits, wanted, tokens, by_id, out, highest, sums, run_maxima, count_rows, penalties, counts, vocab,
    blocks, width, ids_per_row, PENALTIES: tl.constexpr, BLOCKS: tl.constexpr, RUNS: tl.constexpr,
    BLOCK: tl.constexpr, RUN: tl.constexpr, MAX_TOP: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    request = wanted + number * _COLUMNS
    source = tl.load(request + 1).to(tl.int64)
    if source >= 0:
        token, slot = tl.load(tokens + tl.load(request + 2)), tl.load(request + 3).to(tl.int64)
        out_row, top = tl.load(request).to(tl.int64), tl.minimum(tl.load(request + 4), vocab)
        ids, values = out + out_row * 2 * width, out + (out_row * 2 + 1) * width
        total = _total(highest + number * blocks, sums + number * blocks, blocks, BLOCKS)
        drawn = _final(
            logits, source, slot, token, token, token < vocab, vocab, count_rows, penalties, counts, PENALTIES
        )
        tl.store(ids, token.to(tl.int32))
        tl.store(values, _encode_logprob(drawn, total))

        rank = tl.arange(0, MAX_TOP)
        index, count = tl.arange(0, RUNS), blocks * (BLOCK // RUN)
        run_tops = tl.load(run_maxima + number * count + index, index < count, float("-inf"))
        keys = tl.where(index < count, _key(run_tops, index), _REMOVED)
        picked = tl.zeros([MAX_TOP], tl.int32)
        for k in range(top):
            best = tl.max(keys, 0)
            picked = tl.where(rank == k, _index_of(best), picked)
            keys = tl.where(keys == best, _REMOVED, keys)

        index = tl.reshape(picked[:, None] * RUN + tl.arange(0, RUN)[None, :], [MAX_TOP * RUN])
        inside = (index < vocab) & (tl.arange(0, MAX_TOP * RUN) < top * RUN)
        value = _final(
            logits, source, slot, token, index, inside, vocab, count_rows, penalties, counts, PENALTIES
        )
        keys = tl.where(inside, _key(value, index), _REMOVED)
        chosen = tl.zeros([MAX_TOP], tl.int64)
        for k in range(top):
            best = tl.max(keys, 0)
            chosen = tl.where(rank == k, best, chosen)
            keys = tl.where(keys == best, _REMOVED, keys)
        tl.store(ids + 1 + rank, _index_of(chosen), rank < top)
        tl.store(values + 1 + rank, _encode_logprob(_value_of(chosen), total), rank < top)

        for begin in range(0, ids_per_row, MAX_TOP):
            column = begin + rank
            inside_ids = column < ids_per_row
            name = tl.load(by_id + out_row * ids_per_row + column, inside_ids, 0).to(tl.int32)
            logit = _final(
                logits, source, slot, token, name, inside_ids, vocab, count_rows, penalties, counts, PENALTIES
            )
            at = width - ids_per_row + column
            tl.store(ids + at, name, inside_ids)
            tl.store(values + at, _encode_logprob(logit, total), inside_ids)


def write_logprobs(
    logits: torch.Tensor,
    wanted: torch.Tensor,
    tokens: torch.Tensor,
    out: torch.Tensor,
    by_id: torch.Tensor | None = None,
    processing: LogitsProcessing | None = None,
) -> None:
    """Write log probabilities for rows of logits to rows of `out`; tokens with equal logits rank by id.

    Args:
        logits: Logits [any, vocab], contiguous.
        wanted: One line per row to write, int32 [n, 5], contiguous: row of `out`, row of `logits` (-1 to
            write nothing), row of `tokens`, slot, and number of most probable tokens (at most `MAX_TOP`).
        tokens: Sampled tokens, int64 [any].
        out: Table, int32 [any, 2, m], contiguous: token ids, and the bits of their float32 log probabilities.
            The sampled token comes first, then the most probable tokens; the last columns are for `by_id`.
        by_id: Token ids whose log probabilities are wanted too, int64 [rows of `out`, any], contiguous.
        processing: Penalties by slot; the sampled tokens must already be counted.
    """
    count, vocab = len(wanted), logits.shape[1]
    blocks = triton.cdiv(vocab, BLOCK)
    highest = torch.empty((count, blocks), dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(highest)  # aligned separately, so that all batch sizes run the same kernels
    run_maxima = torch.empty((count, blocks * (BLOCK // RUN)), dtype=torch.float32, device=logits.device)
    if processing is None:
        penalties = (logits,) * 3
    else:
        penalties = (processing.count_rows, processing.values, processing.counts)
    ids, ids_per_row = (tokens, 0) if by_id is None else (by_id, by_id.shape[1])
    flags = {"PENALTIES": processing is not None, "BLOCK": BLOCK, "RUN": RUN, "num_warps": 8}
    _scan_kernel[(count, blocks)](
        logits, wanted, tokens, highest, sums, run_maxima, *penalties, vocab, **flags
    )  # fmt: skip
    _select_kernel[(count,)](
        logits, wanted, tokens, ids, out, highest, sums, run_maxima, *penalties, vocab, blocks,
        out.shape[2], ids_per_row, BLOCKS=triton.next_power_of_2(blocks),
        RUNS=triton.next_power_of_2(run_maxima.shape[1]), MAX_TOP=MAX_TOP, **flags,
    )  # fmt: skip
