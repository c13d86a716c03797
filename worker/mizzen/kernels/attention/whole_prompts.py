# SPDX-License-Identifier: Apache-2.0
"""Bidirectional attention within prompts of unequal lengths, as FlashAttention 2 (arXiv 2307.08691) in Triton.

A tile is a block of queries of one prompt. Which tiles there are is computed once for a batch, on the device,
so that the kernels of all layers begin at once and may be captured in a graph. Programs run over the tiles
that exist, however many prompts a graph allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
HEAD_DIMS = (32, 64, 128)
"""Head sizes of the kernel."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Tiling of the kernel."""

    queries: int
    keys: int
    warps: int
    stages: int
    programs: int
    """Number of programs for each multiprocessor."""


TILE = AttentionTile(64, 64, 4, 3, 3)


@triton.jit
def _plan_kernel(
    begins, first_queries, prompts_of_tiles, count, prompts, longest, most,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the tiles of a batch: the first query and the prompt of each, and their number."""
    prompt = tl.arange(0, BLOCK)
    inside = prompt < prompts
    begin = tl.load(begins + prompt, inside, 0)
    length = tl.where(inside, tl.load(begins + prompt + 1, inside, 0) - begin, 0)
    tiles = (tl.minimum(length, longest) + QUERIES - 1) // QUERIES
    ends = tl.cumsum(tiles, 0)
    first = ends - tiles
    tl.store(count, tl.sum(tiles, 0))
    for number in range(0, tl.max(tiles, 0)):
        exists = number < tiles
        tl.store(first_queries + first + number, begin + number * QUERIES, exists)
        tl.store(prompts_of_tiles + first + number, prompt, exists)


@triton.jit
def _add_keys(
    q, k_at, v_at, key, end, query, reach, top, total, acc, scale,
    MASK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Add a block of keys and values to the running softmax maxima, weight totals and weighted sums."""
    if MASK:
        inside = key < end
        k = tl.load(k_at, inside[:, None], 0.0)
        v = tl.load(v_at, inside[:, None], 0.0)
    else:
        k, v = tl.load(k_at), tl.load(v_at)
    scores = tl.dot(q, tl.trans(k))
    if WINDOW:
        distance = query[:, None] - key[None, :]
        seen = (distance <= reach) & (distance >= -reach)
        if MASK:
            seen &= (key < end)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    elif MASK:
        scores = tl.where((key < end)[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return higher, total, acc


@triton.jit
def _attention_kernel(
    q, k, v, begins, first_queries, prompts_of_tiles, count, out, stride, out_stride, scale, longest, reach,
    HEADS: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, SIZE)
    tiles = tl.load(count)
    for unit in range(tl.program_id(0), tiles * HEADS, PROGRAMS):
        head, tile = unit // tiles, unit % tiles
        prompt = tl.load(prompts_of_tiles + tile)
        first = tl.load(first_queries + tile)
        begin = tl.load(begins + prompt)
        end = tl.minimum(tl.load(begins + prompt + 1), begin + longest)
        query = first + tl.arange(0, QUERIES)
        real = (query < end)[:, None]
        low, high = begin, end
        if WINDOW:
            low = tl.maximum(begin, first - reach)
            high = tl.minimum(end, first + QUERIES + reach)
        at = head * SIZE + column[None, :]
        queries = tl.load(q + query.to(tl.int64)[:, None] * stride + at, real, 0.0)
        top = tl.full((QUERIES,), -1.0e30, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        acc = tl.zeros((QUERIES, SIZE), tl.float32)
        full = low + (high - low) // KEYS * KEYS
        for start in range(low, full, KEYS):
            key = start + tl.arange(0, KEYS)
            row = key.to(tl.int64)[:, None] * stride + at
            top, total, acc = _add_keys(
                queries, k + row, v + row, key, high, query, reach, top, total, acc, scale, False, WINDOW
            )
        if full < high:
            key = full + tl.arange(0, KEYS)
            row = key.to(tl.int64)[:, None] * stride + at
            top, total, acc = _add_keys(
                queries, k + row, v + row, key, high, query, reach, top, total, acc, scale, True, WINDOW
            )
        out_at = out + query.to(tl.int64)[:, None] * out_stride + at
        tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), real)


@dataclass(frozen=True, slots=True)
class PromptTiles:
    """Tiles of a batch, on the device."""

    begins: torch.Tensor
    """Begin of each prompt and the end of the last one, int32 [prompts + 1]."""
    first_queries: torch.Tensor
    """First query of each tile, int32 [most tiles]."""
    prompts: torch.Tensor
    """Prompt of each tile, int32 [most tiles]."""
    count: torch.Tensor
    """Number of tiles, int32 [1]."""
    longest: int


def plan_tiles(begins: torch.Tensor, tokens: int, longest: int, tile: AttentionTile = TILE) -> PromptTiles:
    """Return the tiles of prompts; queries of a prompt behind its first `longest` are left out."""
    prompts = len(begins) - 1
    most = tokens // tile.queries + prompts
    first_queries, of_tiles = (torch.empty(most, dtype=torch.int32, device=begins.device) for _ in range(2))
    count = torch.empty(1, dtype=torch.int32, device=begins.device)
    _plan_kernel[(1,)](
        begins, first_queries, of_tiles, count, prompts, longest, most,
        QUERIES=tile.queries, BLOCK=triton.next_power_of_2(prompts), num_warps=4,
    )  # fmt: skip
    return PromptTiles(begins, first_queries, of_tiles, count, longest)


def attend_tiles(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: PromptTiles, reach: int, tile: AttentionTile = TILE
) -> torch.Tensor:
    """Compute attention."""
    tokens, heads, size = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    programs = tile.programs * torch.cuda.get_device_properties(q.device).multi_processor_count
    _attention_kernel[(programs,)](
        q, k, v, tiles.begins, tiles.first_queries, tiles.prompts, tiles.count, out,
        q.stride(0), out.stride(0), size**-0.5 * LOG2E, tiles.longest, max(reach, 0),
        HEADS=heads, SIZE=size, QUERIES=tile.queries, KEYS=tile.keys, WINDOW=reach >= 0, PROGRAMS=programs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
