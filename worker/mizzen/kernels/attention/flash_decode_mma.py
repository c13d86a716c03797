"""Decode attention over paged KV on tensor cores, from cache to registers without a stop in shared memory.

It does what `mizzen.kernels.attention.flash_decode_triton` does (from the raw projection to attended values, the context split over
programs, the last of which merges), for heads of 64 or 128, at most eight of which share a KV head, with
keys and values in bfloat16 or 8-bit floats (e4m3).

A warp takes 16 tokens at a time. Scores are keys times queries, so that tokens lie along the 16 rows of a
tensor core's tile and query heads along its 8 columns; the attended sum is values (transposed) times
probabilities. A lane holds 16 contiguous bytes of a token wherever a fragment asks for scattered numbers: the
order of a product's inner dimension, and of the sum's rows, is free as long as both sides agree. Values of
two tokens are interleaved in registers, which is also where 8-bit floats become float16.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mizzen.kernels.attention.flash_decode_triton import LOG2E, LayerKV, QKVPrep, DecodeTiling, Workspace
from mizzen.kernels.launch import hopper
from mizzen.kernels.nvrtc import KernelSpec, load_kernel, launch, can_compile, read_source

SIZES = {torch.bfloat16: (64, 128), torch.float8_e4m3fn: (128,)}
"""Heads that the kernel serves, by the precision of the cache."""
GROUPS = 8
"""Most query heads that share a KV head."""
WARPS = (4, 8)
"""Of a block, see `cut_of`."""
MOST = 64
"""Most programs that share a row's context."""
PROGRAMS = 1024
"""Split programs of a kernel at most, for which a workspace has to have room."""
RESIDENT = {(128, torch.bfloat16): 3, (64, torch.bfloat16): 4, (128, torch.float8_e4m3fn): 4}
"""Blocks of four warps that a multiprocessor is to hold at once, by a head's size and the cache's precision.

Left to itself the compiler takes more registers for 8-bit caches, and fewer for heads of 64: both are slower.
"""
SOURCE = read_source("attention/flash_decode_mma")


def serves(cache: torch.Tensor, group: int) -> bool:
    """Tell whether the kernel runs over a layer's keys [slot_mapping, kv_heads, size] with `group` queries each.

    False where device, precision or shape are others, or (with a warning) where kernels cannot be compiled.
    Queries and outputs are bfloat16.
    """
    kv_heads, size = cache.shape[1:]
    if not hopper(cache.device) or size not in SIZES.get(cache.dtype, ()) or group > GROUPS:
        return False
    defines = definitions(size, group, kv_heads, 16, None, 4, cache.dtype, norm=True, projected=True)
    return can_compile(SOURCE, "paged", defines, cache.device, "attention runs by Triton")


def definitions(
    size: int,
    group: int,
    kv_heads: int,
    page: int,
    window: int | None,
    warps: int,
    cache: torch.dtype,
    *,
    norm: bool,
    projected: bool,
    uneven: bool = False,
) -> tuple[tuple[str, int], ...]:
    """Return what the kernel is compiled with."""
    shape = (("SIZE", size), ("GROUP", group), ("KV", kv_heads), ("PAGE", page), ("WINDOW", window or 0))
    how = (("WARPS", warps), ("MOST", MOST), ("NORM", int(norm)), ("PROJECTED", int(projected)))
    resident = RESIDENT[size, cache] if warps == 4 else 1
    numbers = (("FP8", int(cache == torch.float8_e4m3fn)), ("RESIDENT", resident))
    return (*shape, *how, *numbers, ("UNEVEN", int(uneven)))


def kernel_specs(
    cache: torch.Tensor, group: int, page: int, windows: Iterable[int | None], *, norm: bool
) -> set[KernelSpec]:
    """Return what attention over caches like this [slot_mapping, kv_heads, size] may be compiled from.

    From raw projections, with norms or without, and from ready queries; cut plainly and by lengths.
    """
    kv_heads, size = cache.shape[1:]
    return {
        (SOURCE, "paged", definitions(
            size, group, kv_heads, page, window, warps, cache.dtype, norm=normed, projected=raw, uneven=uneven
        ))
        for window in windows
        for warps in WARPS
        for uneven in (False, True)
        for raw, normed in ((True, norm), (False, False))
    }  # fmt: skip


def select_tiling(rows: int, cache: torch.Tensor) -> DecodeTiling:
    """Choose how to cut a batch over a layer's keys [slot_mapping, kv_heads, size]."""
    kv_heads, size = cache.shape[1:]
    processors = torch.cuda.get_device_properties(cache.device).multi_processor_count
    splits, warps = cut_of(rows * kv_heads, processors, RESIDENT[size, cache.dtype])
    return DecodeTiling(splits=splits, block=16, warps=warps, stages=0)


def cut_of(pairs: int, processors: int, resident: int) -> tuple[int, int]:
    """Choose parts and warps for so many pairs of a row and a KV head, as was measured fastest.

    Multiprocessors share the memory's rate, so what counts is that all have as much to read, and enough of it
    on the way. Of blocks with eight warps each holds one: up to a pair for each. Then one round of smaller
    blocks, `resident` on each, which must not begin while a product still has multiprocessors of its own
    (`wide` lets them begin late). Beyond, parts only cost.
    """
    room = resident * processors
    if pairs <= processors:
        splits, warps = min(MOST, processors // pairs), 8
    elif pairs <= room:
        splits, warps = room // pairs, 4
    else:
        splits, warps = 1, 8 if pairs <= 4 * processors else 4
    return max(1, min(splits, PROGRAMS // pairs)), warps


def attend(
    q: torch.Tensor,
    projections: QKVPrep | None,
    cache: LayerKV,
    out: torch.Tensor,
    window: int | None,
    tiling: DecodeTiling,
    workspace: SplitWorkspace,
    items: torch.Tensor | None = None,
) -> None:
    """Attend one query token a row; see `mizzen.kernels.attention.flash_decode_triton.attend`.

    Of the tiling, splits and warps count; the cache's scales must be 1. With `items`, a plan of
    `mizzen.kernels.attention.split_plan`, its parts take the place of the tiling's splits.
    """
    rows, heads, size = out.shape
    kv_heads = cache.keys.shape[1]
    norm = projections is not None and projections.norms is not None
    q_scales = k_scales = cos = sin = slot_mapping = q
    epsilon = 0.0
    if projections is not None:
        cos, sin, slot_mapping, epsilon = projections.cos, projections.sin, projections.slot_mapping, projections.epsilon
        if projections.norms is not None:
            q_scales, k_scales = projections.norms
    defines = definitions(
        size, heads // kv_heads, kv_heads, cache.page_size, window, tiling.warps, cache.keys.dtype,
        norm=norm, projected=projections is not None, uneven=items is not None,
    )  # fmt: skip
    function = load_kernel(SOURCE, "paged", defines, q.device.index or 0)
    arguments = (
        q, q_scales, k_scales, cos, sin, slot_mapping, cache.slots, cache.lengths, cache.table, cache.keys,
        cache.values, out, workspace.sums, workspace.stats, workspace.counters, cache.table.shape[1],
        q.stride(0), tiling.splits if items is None else items, epsilon, LOG2E / size**0.5,
    )  # fmt: skip
    blocks = (tiling.splits, kv_heads, rows) if items is None else (kv_heads, len(items), 1)
    launch(function, blocks, 32 * tiling.warps, arguments)
