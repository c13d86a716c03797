# SPDX-License-Identifier: Apache-2.0
"""Split-KV decode attention over paged KV on tensor cores (CUDA); KV goes straight from memory to registers.

The kernel computes the same as `mizzen.kernels.attention.flash_decode_triton`: it starts at the raw QKV
projection, splits each row's context over several blocks, and the last of these blocks merges their results.
It supports head dims of 64 and 128, GQA groups of up to eight query heads, and KV in bfloat16 or, with head
dim 128, in 8-bit floats (e4m3). An attention sink only adds its share to the sum of the softmax weights,
once, where the output of a head is divided by this sum.

A warp processes 16 tokens at a time. Scores are keys times queries, so tokens lie along the 16 rows of an MMA
tile and query heads along its 8 columns; the output is values (transposed) times probabilities. Where an MMA
fragment wants scattered elements, a lane holds 16 contiguous bytes of a token instead: the inner dimension
and the output rows of an MMA may be in any order, as long as both operands agree. Values of two tokens are
interleaved in registers, where 8-bit floats are also converted to float16.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mizzen.kernels.attention.flash_decode_triton import (
    DecodeTiling,
    LayerKV,
    QKVPrep,
    SplitWorkspace,
)
from mizzen.kernels.launch import is_hopper_or_later
from mizzen.kernels.nvrtc import KernelSpec, can_compile, launch, load_kernel, read_source

HEAD_DIMS = {torch.bfloat16: (64, 128), torch.float8_e4m3fn: (128,)}
"""Head dims that the kernel supports, by the dtype of the cache."""
MAX_GQA_GROUP_SIZE = 8
"""Maximum number of query heads that share a KV head."""
WARP_COUNTS = (4, 8)
"""Numbers of warps per block for which the kernel is compiled; `select_splits` chooses one."""
WINDOW_WARPS = 12
"""Number of warps, instead of eight, for windows with at most that many tiles of 16 tokens: one for each."""
MAX_MERGED_BYTES = 40 * 1024
"""Maximum size of the results of a block's warps, which are in static shared memory."""
MAX_SPLITS = 64
"""Maximum number of splits of one row's context."""
MAX_PROGRAMS = 1024
"""Maximum number of blocks of a batch whose rows have several splits each.

A workspace must hold the partial results of all these blocks.
"""
BLOCKS_PER_SM = {(128, torch.bfloat16): 3, (64, torch.bfloat16): 4, (128, torch.float8_e4m3fn): 4}
"""Number of four-warp blocks that must fit on an SM at once, by head dim and dtype of the cache.

The compiler gets this number as a launch bound. Without the bound, kernels for 8-bit caches would use more
registers, and kernels for head dim 64 would use fewer; both kinds would be slower.
"""
SOURCE = "".join(
    read_source(name) for name in ("bf16", "attention/decode_fragments", "attention/flash_decode_mma")
)


def supports(cache: torch.Tensor, group: int) -> bool:
    """Return whether the kernel supports a layer's key cache and `group` query heads per KV head.

    The result is False for unsupported devices, dtypes and shapes. It is also False, with a warning, if the
    kernel cannot be compiled. `cache` is [KV slots, kv_heads, head_dim]; queries and outputs are bfloat16.
    """
    kv_heads, size = cache.shape[1:]
    if (
        not is_hopper_or_later(cache.device)
        or size not in HEAD_DIMS.get(cache.dtype, ())
        or group > MAX_GQA_GROUP_SIZE
    ):
        return False
    defines = compile_definitions(size, group, kv_heads, 16, None, 4, cache.dtype, norm=True, fused_qkv=True)
    return can_compile(SOURCE, "flash_decode_mma", defines, cache.device, "attention falls back to Triton")


def compile_definitions(
    size: int,
    group: int,
    kv_heads: int,
    page: int,
    window: int | None,
    warps: int,
    cache: torch.dtype,
    *,
    norm: bool,
    fused_qkv: bool,
    planned_splits: bool = False,
    sinks: bool = False,
) -> tuple[tuple[str, int], ...]:
    """Return the preprocessor definitions of one variant of the kernel.

    Args:
        size: Head dim.
        group: Number of query heads per KV head.
        kv_heads: Number of KV heads.
        page: Tokens per page.
        window: Sliding window in tokens; None for full attention.
        warps: Warps per block, one of `WARP_COUNTS` or `WINDOW_WARPS`.
        cache: Dtype of the KV cache.
        norm: Whether the kernel applies QK norm.
        fused_qkv: Whether the kernel starts at the raw QKV projection.
        planned_splits: Whether the kernel reads its splits from a plan of `split_plan`.
        sinks: Whether each head has an attention sink.
    """
    shape = (
        ("HEAD_DIM", size),
        ("GQA_GROUP", group),
        ("KV_HEADS", kv_heads),
        ("PAGE_SIZE", page),
        ("WINDOW", window or 0),
    )
    how = (("WARPS", warps), ("MAX_SPLITS", MAX_SPLITS), ("NORM", int(norm)), ("FUSED_QKV", int(fused_qkv)))
    blocks_per_sm = BLOCKS_PER_SM[size, cache] if warps == 4 else 1
    numbers = (("FP8", int(cache == torch.float8_e4m3fn)), ("BLOCKS_PER_SM", blocks_per_sm))
    return (*shape, *how, *numbers, ("PLANNED_SPLITS", int(planned_splits)), ("SINKS", int(sinks)))


def kernel_specs(
    cache: torch.Tensor,
    group: int,
    page: int,
    windows: Iterable[int | None],
    *,
    norm: bool,
    sinks: bool = False,
) -> set[KernelSpec]:
    """Return the specs of all kernel variants that attention over a layer's key cache may use.

    There are variants for raw projections (with QK norm if `norm`) and for ready queries, each with equal and
    with length-aware splits. `cache` is [KV slots, kv_heads, head_dim]; `page` is the number of tokens per
    page, and `windows` are the layers' sliding windows in tokens. `sinks` says whether heads have attention
    sinks.
    """
    kv_heads, size = cache.shape[1:]
    return {
        (SOURCE, "flash_decode_mma", compile_definitions(
            size, group, kv_heads, page, window,
            warps if planned_splits else select_warps(warps, window, size, group), cache.dtype,
            norm=normed, fused_qkv=raw, planned_splits=planned_splits, sinks=sinks,
        ))
        for window in windows
        for warps in WARP_COUNTS
        for planned_splits in (False, True)
        for raw, normed in ((True, norm), (False, False))
    }  # fmt: skip


def select_tiling(rows: int, cache: torch.Tensor) -> DecodeTiling:
    """Return the tiling for a batch of `rows` rows that reads a layer's KV cache.

    `cache` is the layer's key cache [KV slots, kv_heads, head_dim].
    """
    kv_heads, size = cache.shape[1:]
    sm_count = torch.cuda.get_device_properties(cache.device).multi_processor_count
    splits, warps = select_splits(rows * kv_heads, sm_count, BLOCKS_PER_SM[size, cache.dtype])
    return DecodeTiling(splits=splits, block=16, warps=warps, stages=0)


def select_splits(pairs: int, sm_count: int, blocks_per_sm: int) -> tuple[int, int]:
    """Return the number of splits per row and the number of warps per block that were measured fastest.

    `pairs` is the number of pairs of a row and a KV head. SMs share the memory bandwidth, so all of them
    should have equal work and enough loads in flight. For up to one pair per SM, each SM runs one block of
    eight warps. For more pairs, all SMs run one wave of four-warp blocks, `blocks_per_sm` each. These blocks
    must start together: if they started while the previous GEMM ran, they would crowd on the SMs that it
    leaves idle (`defer_pdl` in `swap_ab` prevents this). If the pairs do not fit in one wave, splitting them
    only adds cost.
    """
    room = blocks_per_sm * sm_count
    if pairs <= sm_count:
        splits, warps = min(MAX_SPLITS, sm_count // pairs), 8
    elif pairs <= room:
        splits, warps = room // pairs, 4
    else:
        splits, warps = 1, 8 if pairs <= 4 * sm_count else 4
    return max(1, min(splits, MAX_PROGRAMS // pairs)), warps


def select_warps(warps: int, window: int | None, size: int, group: int) -> int:
    """Return the number of warps per block for a layer with a sliding window, from that of other layers.

    With `WINDOW_WARPS`, no warp works on two tiles of a short window, and only one block works on a row.
    `size` is the head dim, and `group` the number of query heads per KV head.
    """
    short = window is not None and window // 16 + 1 <= WINDOW_WARPS
    fits = WINDOW_WARPS * group * size * 4 <= MAX_MERGED_BYTES
    return WINDOW_WARPS if warps == 8 and short and fits else warps


def attend(
    q: torch.Tensor,
    qkv_prep: QKVPrep | None,
    cache: LayerKV,
    out: torch.Tensor,
    window: int | None,
    tiling: DecodeTiling,
    workspace: SplitWorkspace,
    items: torch.Tensor | None = None,
) -> None:
    """Attend with one query token per row.

    Args:
        q: With `qkv_prep`, raw projections [rows, (heads + 2 * kv_heads) * d], whose keys and values the
            kernel stores; otherwise ready queries [rows, heads, d], whose keys and values are all cached.
            bfloat16.
        qkv_prep: Norms (bfloat16) and angles for making queries, keys and values from `q`.
        cache: KV of the layer; its scales must be 1.
        out: Tensor for the output [rows, heads, d], bfloat16, contiguous.
        window: Number of tokens that a token attends to, including itself; None for all.
        tiling: Tiling of the batch; only its `splits` and `warps` are used.
        workspace: Workspace that is large enough for `tiling` or `items`; no concurrent kernel may use it.
        items: Plan of `mizzen.kernels.attention.split_plan`, int32 [items, 4], whose splits replace
            `tiling.splits`; None for equal splits.
    """
    rows, heads, size = out.shape
    kv_heads = cache.keys.shape[1]
    norm = qkv_prep is not None and qkv_prep.norms is not None
    q_scales = k_scales = cos = sin = slot_mapping = q
    epsilon = 0.0
    if qkv_prep is not None:
        cos, sin, slot_mapping, epsilon = qkv_prep.cos, qkv_prep.sin, qkv_prep.slot_mapping, qkv_prep.epsilon
        if qkv_prep.norms is not None:
            q_scales, k_scales = qkv_prep.norms
    group = heads // kv_heads
    warps = tiling.warps if items is not None else select_warps(tiling.warps, window, size, group)
    defines = compile_definitions(
        size, group, kv_heads, cache.page_size, window, warps, cache.keys.dtype,
        norm=norm, fused_qkv=qkv_prep is not None, planned_splits=items is not None,
        sinks=cache.sinks is not None,
    )  # fmt: skip
    function = load_kernel(SOURCE, "flash_decode_mma", defines, q.device.index or 0)
    arguments = (
        q, q_scales, k_scales, cos, sin, slot_mapping, cache.slots, cache.lengths, cache.table, cache.keys,
        cache.values, out, workspace.sums, workspace.stats, workspace.counters, cache.table.shape[1],
        q.stride(0), tiling.splits if items is None else items, epsilon, cache.log2_scale,
    )  # fmt: skip
    blocks = (tiling.splits, kv_heads, rows) if items is None else (kv_heads, len(items), 1)
    sinks = () if cache.sinks is None else (cache.sinks,)
    launch(function, blocks, 32 * warps, (*arguments, *sinks))
