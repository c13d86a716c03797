# SPDX-License-Identifier: Apache-2.0
"""Bidirectional attention within prompts of unequal lengths: FlashAttention 2 (arXiv 2307.08691) in Triton.

A tile is a block of queries of one prompt. The tiles of a batch are planned once, on the device, for the
kernels of all layers, which may be captured in a graph. A fixed number of programs share the tiles that
exist, so the time does not depend on how many prompts a graph allows. Queries, keys and values are copied by
the tensor memory accelerator (TMA).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mizzen.kernels.attention.flash_decode_triton import LOG2E

QUERIES, KEYS = 64, 64
"""Tiling: queries of a tile, and keys that a program reads at once."""
WARPS, STAGES, PROGRAMS_PER_SM = 4, 3, 3
"""Launch options, measured on an H100 with head sizes of 32 and 64."""
PLANNED_AT_ONCE = 512
"""Prompts that are planned together; a constant, so that no number of prompts compiles another kernel."""


@dataclass(frozen=True, slots=True)
class PromptTiles:
    """Tiles of a batch of prompts, on the device."""

    begins: torch.Tensor
    """Begin of each prompt and the end of the last one, int32 [prompts + 1]."""
    first_queries: torch.Tensor
    """First query of each tile, int32 [most tiles]."""
    prompts: torch.Tensor
    """Prompt of each tile, int32 [most tiles]."""
    count: torch.Tensor
    """Number of tiles, int32 [1]."""
    longest: int
    """Number of first tokens of a prompt that attention considers."""


@triton.jit(do_not_specialize=["prompts", "longest"])
def _plan_kernel(
    begins,
    first_queries,
    prompts_of_tiles,
    count,
    prompts,
    longest,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = tl.zeros((), tl.int32)
    for start in range(0, prompts, BLOCK):
        prompt = start + tl.arange(0, BLOCK)
        inside = prompt < prompts
        begin = tl.load(begins + prompt, inside, 0)
        length = tl.where(inside, tl.load(begins + prompt + 1, inside, 0) - begin, 0)
        tiles = (tl.minimum(length, longest) + QUERIES - 1) // QUERIES
        first = total + tl.cumsum(tiles, 0) - tiles
        for number in range(tl.max(tiles, 0)):
            exists = number < tiles
            tl.store(first_queries + first + number, begin + number * QUERIES, exists)
            tl.store(prompts_of_tiles + first + number, prompt, exists)
        total += tl.sum(tiles, 0)
    tl.store(count, total)


@triton.jit
def _add_keys(
    q, k, v, key, end, query, reach, top, total, acc, scale, MASK: tl.constexpr, WINDOW: tl.constexpr
):
    """Add a block of keys and values to the running softmax maxima, weight totals and weighted sums.

    With MASK, keys from `end` on belong to no token of the prompt, and may be NaN.
    """
    scores = tl.dot(q, tl.trans(k))
    if WINDOW:
        distance = query[:, None] - key[None, :]
        seen = (distance <= reach) & (distance >= -reach)
        if MASK:
            seen &= (key < end)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    elif MASK:
        scores = tl.where((key < end)[None, :], scores, float("-inf"))
    if MASK:
        v = tl.where((key < end)[:, None], v, 0.0)
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return higher, total, acc


@triton.jit(do_not_specialize=["longest", "reach"])
def _attention_kernel(
    q, k, v, begins, first_queries, prompts_of_tiles, count, out, scale, longest, reach,
    HEADS: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    tiles = tl.load(count)
    for unit in range(tl.program_id(0), tiles * HEADS, PROGRAMS):
        head, tile = unit // tiles, unit % tiles
        prompt, first = tl.load(prompts_of_tiles + tile), tl.load(first_queries + tile)
        begin = tl.load(begins + prompt)
        end = tl.minimum(tl.load(begins + prompt + 1), begin + longest)
        query = first + tl.arange(0, QUERIES)
        low, high = begin, end
        if WINDOW:
            low, high = tl.maximum(begin, first - reach), tl.minimum(end, first + QUERIES + reach)
        column = head * SIZE
        queries = q.load([first, column])
        # Not infinite: a row may see no key of a block, and the difference of infinite maxima is NaN.
        top = tl.full((QUERIES,), -1.0e30, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        acc = tl.zeros((QUERIES, SIZE), tl.float32)
        full = low + (high - low) // KEYS * KEYS
        for start in range(low, full, KEYS):
            top, total, acc = _add_keys(
                queries, k.load([start, column]), v.load([start, column]), start + tl.arange(0, KEYS), high,
                query, reach, top, total, acc, scale, False, WINDOW,
            )  # fmt: skip
        if full < high:
            top, total, acc = _add_keys(
                queries, k.load([full, column]), v.load([full, column]), full + tl.arange(0, KEYS), high,
                query, reach, top, total, acc, scale, True, WINDOW,
            )  # fmt: skip
        out_at = out + query.to(tl.int64)[:, None] * (HEADS * SIZE) + column + tl.arange(0, SIZE)[None, :]
        tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), (query < end)[:, None])


def plan_tiles(begins: torch.Tensor, tokens: int, longest: int) -> PromptTiles:
    """Return the tiles of a batch of `tokens` tokens.

    Args:
        begins: Begin of each prompt and the end of the last one, int32 [prompts + 1]; prompts may be empty.
        tokens: Number of tokens of the batch.
        longest: Tokens after the first `longest` of a prompt are left out; their attention is not computed.
    """
    prompts = len(begins) - 1
    most = tokens // QUERIES + prompts
    first_queries, of_tiles = (torch.empty(most, dtype=torch.int32, device=begins.device) for _ in range(2))
    count = torch.empty(1, dtype=torch.int32, device=begins.device)
    _plan_kernel[(1,)](
        begins, first_queries, of_tiles, count, prompts, longest,
        QUERIES=QUERIES, BLOCK=PLANNED_AT_ONCE,
    )  # fmt: skip
    return PromptTiles(begins, first_queries, of_tiles, count, longest)


def describe(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Return the descriptor for copies of `rows` tokens of one head of x [tokens, heads, d]."""
    tokens, heads, size = x.shape
    flat = x.as_strided((tokens, heads * size), (x.stride(0), 1))
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, size])


def attend_tiles(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: PromptTiles, reach: int
) -> torch.Tensor:
    """Compute attention within prompts; return [tokens, heads, d].

    Args:
        q: Queries [tokens, heads, d], in 16 bits; the heads of a token are contiguous, and begins of tokens
            are aligned to 16 bytes. `d` is a power of two.
        k: Keys, as `q`.
        v: Values, as `q`.
        tiles: Tiles of the batch.
        reach: Number of tokens to each side that a token attends to; -1 for its whole prompt.
    """
    tokens, heads, size = q.shape
    out = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device)
    programs = PROGRAMS_PER_SM * torch.cuda.get_device_properties(q.device).multi_processor_count
    _attention_kernel[(programs,)](
        describe(q, QUERIES), describe(k, KEYS), describe(v, KEYS), tiles.begins, tiles.first_queries,
        tiles.prompts, tiles.count, out, size**-0.5 * LOG2E, tiles.longest, reach,
        HEADS=heads, SIZE=size, QUERIES=QUERIES, KEYS=KEYS, WINDOW=reach >= 0, PROGRAMS=programs,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out
