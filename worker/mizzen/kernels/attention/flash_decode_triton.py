# SPDX-License-Identifier: Apache-2.0
"""Split-KV decode attention over paged KV (Flash-Decoding) in Triton, with fused QK norm, RoPE and KV write.

One kernel takes the raw projections of a decode batch. It normalises and rotates queries and keys, stores the
new keys and values, and attends. If several programs share the context of a row, the last of them to finish
merges their partial results. Keys and values of earlier steps do not depend on the previous kernel, so a
program loads its first block of them before it waits for that kernel (programmatic dependent launch).
"""

# Triton compiles `if STAGES == 0` away; pyright cannot see that two such branches agree.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mizzen.kernels.launch import pdl_launch_options

LOG2E = 1.4426950408889634
ROWS = 16
"""Number of rows of an MMA tile; the queries of a GQA group are padded to this number."""
FP8_MAX = {torch.float8_e4m3fn: 448.0}
"""Largest value of each 8-bit format that has no infinity; stored keys and values are clamped to it."""
_NONE = tl.constexpr(-1.0e30)


@triton.jit
def _block(
    keys, values, table, position, last, stride, column, column_all, PAGE: tl.constexpr, HALF: tl.constexpr
):
    """Load the left and the right halves of keys, and the values; positions from `last` on yield zeros."""
    inside = position < last
    page = tl.load(table + position // PAGE, inside, 0).to(tl.int64)
    cell = (page * PAGE + position % PAGE) * stride
    pair = inside[:, None]
    left = tl.load(keys + cell[:, None] + column, pair, 0.0)
    right = tl.load(keys + cell[:, None] + HALF + column, pair, 0.0)
    value = tl.load(values + cell[:, None] + column_all, pair, 0.0)
    return left, right, value


@triton.jit
def _attend(
    left, right, value, q_left, q_right, position, first, last, top, total, acc, scale, MATH: tl.constexpr
):
    """Add a block of keys and values to the running softmax maxima, weight totals and weighted sums."""
    scores = tl.dot(q_left, tl.trans(left.to(MATH)), input_precision="ieee")
    scores = tl.dot(q_right, tl.trans(right.to(MATH)), scores, input_precision="ieee") * scale
    seen = (position < last) & (position >= first)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(MATH), value.to(MATH), acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def _split_kernel(
    q, k_new, v_new, q_weight, k_weight, cos, sin, slot_mapping, slots, lengths, table, keys, values, out,
    sums, stats, counters, sinks, columns, q_stride, epsilon, scale, k_scale, v_scale, limit,
    KV: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, NORM: tl.constexpr, FUSED_QKV: tl.constexpr, SINKS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = 2 * HALF
    # 8-bit floats convert to float16 in one instruction, to bfloat16 in several.
    MATH: tl.constexpr = tl.float16 if keys.dtype.element_ty.is_fp8() else out.dtype.element_ty
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not FUSED_QKV:
            tl.extra.cuda.gdc_wait()  # the previous kernel stored the newest keys and values
    length = tl.load(lengths + row)
    pages = table + tl.load(slots + row).to(tl.int64) * columns
    # With a raw projection, the newest token's keys and values come from the projection, not from the cache.
    last = length - 1 if FUSED_QKV else length
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    stride = KV * SIZE
    keys_at, values_at = keys + head * SIZE, values + head * SIZE
    column, column_all = tl.arange(0, HALF)[None, :], tl.arange(0, SIZE)[None, :]
    start = (first // BLOCK + split) * BLOCK
    position = start + tl.arange(0, BLOCK)
    if STAGES == 0:
        left, right, value = _block(
            keys_at, values_at, pages, position, last, stride, column, column_all, PAGE, HALF
        )
    if PDL and FUSED_QKV:
        tl.extra.cuda.gdc_wait()

    index = tl.arange(0, ROWS)
    group = index[:, None]
    real = group < GROUP
    q_at = q + row * q_stride + (head * GROUP + group) * SIZE + column
    q_left = tl.load(q_at, real, 0.0).to(tl.float32)
    q_right = tl.load(q_at + HALF, real, 0.0).to(tl.float32)
    top = tl.full((ROWS,), _NONE, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, SIZE), tl.float32)
    if FUSED_QKV:
        k_at = k_new + row * q_stride + head * SIZE + column
        k_left, k_right = tl.load(k_at).to(tl.float32), tl.load(k_at + HALF).to(tl.float32)
        v_all = tl.load(v_new + row * q_stride + head * SIZE + column_all).to(tl.float32)
        if NORM:
            shrink = tl.rsqrt((tl.sum(q_left * q_left, 1) + tl.sum(q_right * q_right, 1)) / SIZE + epsilon)[
                :, None
            ]
            q_left *= shrink * tl.load(q_weight + column).to(tl.float32)
            q_right *= shrink * tl.load(q_weight + HALF + column).to(tl.float32)
            shrink = tl.rsqrt((tl.sum(k_left * k_left, 1) + tl.sum(k_right * k_right, 1)) / SIZE + epsilon)[
                :, None
            ]
            k_left *= shrink * tl.load(k_weight + column).to(tl.float32)
            k_right *= shrink * tl.load(k_weight + HALF + column).to(tl.float32)
        c, s = tl.load(cos + row * HALF + column), tl.load(sin + row * HALF + column)
        q_left, q_right = q_left * c - q_right * s, q_right * c + q_left * s
        k_left, k_right = k_left * c - k_right * s, k_right * c + k_left * s
        k_left, k_right, v_all = k_left / k_scale, k_right / k_scale, v_all / v_scale
        if limit > 0:
            k_left = tl.minimum(tl.maximum(k_left, -limit), limit)
            k_right = tl.minimum(tl.maximum(k_right, -limit), limit)
            v_all = tl.minimum(tl.maximum(v_all, -limit), limit)
        stored_left = k_left.to(keys.dtype.element_ty)
        stored_right = k_right.to(keys.dtype.element_ty)
        stored_v = v_all.to(values.dtype.element_ty)
        if split == 0:
            into = tl.load(slot_mapping + row) * stride
            tl.store(keys_at + into + column, stored_left)
            tl.store(keys_at + into + HALF + column, stored_right)
            tl.store(values_at + into + column_all, stored_v)
            rounded_left, rounded_right = q_left.to(MATH).to(tl.float32), q_right.to(MATH).to(tl.float32)
            score = tl.sum(rounded_left * stored_left.to(tl.float32), 1)
            score += tl.sum(rounded_right * stored_right.to(tl.float32), 1)
            top = score * scale
            total += 1.0
            acc += stored_v.to(tl.float32)
    q_left, q_right = q_left.to(MATH), q_right.to(MATH)

    if STAGES == 0:
        while start < last:
            start += SPLITS * BLOCK
            next_position = position + SPLITS * BLOCK
            next_left, next_right, next_value = _block(
                keys_at, values_at, pages, next_position, last, stride, column, column_all, PAGE, HALF
            )
            top, total, acc = _attend(
                left, right, value, q_left, q_right, position, first, last, top, total, acc, scale, MATH
            )
            left, right, value, position = next_left, next_right, next_value, next_position
    else:
        for begin in tl.range(start, last, SPLITS * BLOCK, num_stages=STAGES):
            position = begin + tl.arange(0, BLOCK)
            left, right, value = _block(
                keys_at, values_at, pages, position, last, stride, column, column_all, PAGE, HALF
            )
            top, total, acc = _attend(
                left, right, value, q_left, q_right, position, first, last, top, total, acc, scale, MATH
            )

    into = out + (row * KV * GROUP + head * GROUP) * SIZE
    if SPLITS == 1:
        if SINKS:  # a sink is a key whose value is zero: it only adds to the total weight
            sink = tl.load(sinks + head * GROUP + index, index < GROUP, _NONE)
            higher = tl.maximum(top, sink)
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.exp2(sink - higher)
            acc *= shrink[:, None]
        tl.store(
            into + group * SIZE + column_all,
            (acc * (v_scale / total)[:, None]).to(out.dtype.element_ty),
            real,
        )
    else:
        place = (row * KV + head) * SPLITS
        at = (place + split) * PADDED
        mine = index < PADDED
        tl.store(sums + (at + group) * SIZE + column_all, acc, mine[:, None])
        tl.store(stats + 2 * (at + index), top, mine)
        tl.store(stats + 2 * (at + index) + 1, total, mine)
        tl.debug_barrier()
        if tl.atomic_add(counters + row * KV + head, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            tl.store(counters + row * KV + head, 0)
            part, query = tl.arange(0, SPLITS)[:, None], tl.arange(0, PADDED)[None, :]
            at_all = (place + part) * PADDED + query
            tops = tl.load(stats + 2 * at_all, cache_modifier=".cg")
            totals = tl.load(stats + 2 * at_all + 1, cache_modifier=".cg")
            parts = tl.load(
                sums + at_all[:, :, None] * SIZE + tl.arange(0, SIZE)[None, None, :], cache_modifier=".cg"
            )
            highest = tl.max(tops, 0)
            if SINKS:
                head_in_group = tl.arange(0, PADDED)
                sink = tl.load(sinks + head * GROUP + head_in_group, head_in_group < GROUP, _NONE)
                highest = tl.maximum(highest, sink)
            share = tl.exp2(tops - highest[None, :])
            weight = tl.sum(totals * share, 0)
            if SINKS:
                weight += tl.exp2(sink - highest)
            merged = tl.sum(parts * share[:, :, None], 0)
            merged = merged * (v_scale / weight)[:, None]
            query_all = tl.arange(0, PADDED)[:, None]
            tl.store(into + query_all * SIZE + column_all, merged.to(out.dtype.element_ty), query_all < GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTiling:
    """Tiling of a decode batch."""

    splits: int
    """Number of programs that share a row's context; a power of two."""
    block: int
    """Number of tokens that a program processes at a time."""
    warps: int
    """Number of warps per program."""
    stages: int
    """Depth of Triton's software pipeline; with 0, a program prefetches one block into registers instead,
    before the PDL wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitWorkspace:
    """Memory for the partial results of a row's programs, which the last of these programs merges.

    Kernels of one stream may share a workspace.
    """

    sums: torch.Tensor
    """Weighted sums of values by program, query head and head dim, float32, flat."""
    stats: torch.Tensor
    """Highest score and total weight by program and query head, float32, flat."""
    counters: torch.Tensor
    """Number of programs that have finished, for each row and KV head, int32; zero between kernels."""

    @classmethod
    def allocate(
        cls, programs: int, pairs: int, group: int, size: int, device: torch.device
    ) -> SplitWorkspace:
        """Allocate a workspace.

        Args:
            programs: Maximum number of programs of a batch whose rows have several splits each.
            pairs: Maximum number of pairs of a row and a KV head.
            group: Number of query heads per KV head.
            size: Head dim.
            device: Device of the batch.
        """
        padded = triton.next_power_of_2(group)
        return cls(
            sums=torch.empty(programs * padded * size, dtype=torch.float32, device=device),
            stats=torch.empty(programs * padded * 2, dtype=torch.float32, device=device),
            counters=torch.zeros(pairs, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QKVPrep:
    """Inputs for making queries, keys and values from a raw QKV projection."""

    norms: tuple[torch.Tensor, torch.Tensor] | None
    """RMSNorm weights [head_dim] of queries and keys; None for a model without QK norm."""
    epsilon: float
    cos: torch.Tensor
    """Cosines of the RoPE angles, float32 [rows, 1, head_dim / 2]; `sin` has the same shape."""
    sin: torch.Tensor
    slot_mapping: torch.Tensor
    """KV slots of the new keys and values, int64 [rows]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """One layer's paged KV, and the slots and lengths of a batch that reads it."""

    keys: torch.Tensor
    """Key cache [KV slots, kv_heads, head_dim]; `values` has the same shape."""
    values: torch.Tensor
    slots: torch.Tensor
    """Row of the page table for each decode row, int32 [rows]."""
    lengths: torch.Tensor
    """Number of tokens whose KV each row reads, including the query token itself, int32 [rows]."""
    table: torch.Tensor
    """Page table, int32 [slots, columns]."""
    page_size: int
    scales: tuple[float, float] = (1.0, 1.0)
    """Factors by which cached keys and cached values are multiplied when they are read."""
    score_scale: float | None = None
    """Factor of the query-key products; None for 1 / sqrt(head_dim)."""
    sinks: torch.Tensor | None = None
    """Score of each head's attention sink, times log2(e), float32 [heads]; None for a model without.

    `score_scale` does not apply to these scores."""

    @property
    def log2_scale(self) -> float:
        """Factor that turns query-key products into exponents of 2, without the keys' scale."""
        size = self.keys.shape[-1]
        return LOG2E * (size**-0.5 if self.score_scale is None else self.score_scale)


def attend(
    q: torch.Tensor,
    qkv_prep: QKVPrep | None,
    cache: LayerKV,
    out: torch.Tensor,
    window: int | None,
    tiling: DecodeTiling,
    workspace: SplitWorkspace,
) -> None:
    """Attend with one query token per row.

    Args:
        q: With `qkv_prep`, raw projections [rows, (heads + 2 * kv_heads) * d], whose keys and values the
            kernel stores; otherwise ready queries [rows, heads, d], whose keys and values are all cached.
        qkv_prep: Norms and angles for making queries, keys and values from `q`.
        cache: KV of the layer.
        out: Tensor for the output [rows, heads, d], contiguous, with the dtype of `q`.
        window: Number of tokens that a token attends to, including itself; None for all.
        tiling: Tiling of the batch.
        workspace: Workspace that is large enough for `tiling`; no concurrent kernel may use it.
    """
    rows, heads, size = out.shape
    kv_heads = cache.keys.shape[1]
    group, half = heads // kv_heads, size // 2
    k_new = v_new = q_weight = k_weight = cos = sin = q
    slot_mapping, epsilon, norm = cache.slots, 0.0, False
    if qkv_prep is not None:
        k_new, v_new = q[:, heads * size :], q[:, (heads + kv_heads) * size :]
        cos, sin, slot_mapping, epsilon = qkv_prep.cos, qkv_prep.sin, qkv_prep.slot_mapping, qkv_prep.epsilon
        if qkv_prep.norms is not None:
            norm, (q_weight, k_weight) = True, qkv_prep.norms
    k_scale, v_scale = cache.scales
    _split_kernel[(tiling.splits, kv_heads, rows)](
        q, k_new, v_new, q_weight, k_weight, cos, sin, slot_mapping, cache.slots, cache.lengths, cache.table,
        cache.keys, cache.values, out, workspace.sums, workspace.stats, workspace.counters,
        q if cache.sinks is None else cache.sinks, cache.table.shape[1], q.stride(0), epsilon,
        k_scale * cache.log2_scale, k_scale, v_scale,
        FP8_MAX.get(cache.keys.dtype, 0.0),
        KV=kv_heads, GROUP=group, PADDED=triton.next_power_of_2(group), HALF=half, PAGE=cache.page_size,
        WINDOW=window or 0, NORM=norm, FUSED_QKV=qkv_prep is not None, SINKS=cache.sinks is not None,
        SPLITS=tiling.splits, BLOCK=tiling.block, ROWS=ROWS, STAGES=tiling.stages, num_warps=tiling.warps,
        **pdl_launch_options(q),
    )  # fmt: skip
