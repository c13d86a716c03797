# SPDX-License-Identifier: Apache-2.0
"""Attention backend for decodes; it runs Mizzen's own split-KV kernels over paged KV.

The kernel is `mizzen.kernels.attention.flash_decode_mma` on Hopper and later GPUs, for the shapes that it
supports, and otherwise `mizzen.kernels.attention.flash_decode_triton`. Both read the lengths and the page
table on the device, so each replay of a captured graph uses their current values. `flash_decode_mma` also
supports length-aware splits, which `mizzen.kernels.attention.split_plan` plans on the device once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from mizzen.attention.base import (
    AttentionBackend,
    DecodeRows,
    FusedDecode,
    Geometry,
    KVFormat,
    PagedKV,
    PageTable,
    PlannedAttention,
    QueryChunk,
    copy_to_device,
)
from mizzen.attention.requirements import find_unmet_requirement, unsupported_error
from mizzen.core.request import Int32, Int64

if TYPE_CHECKING:
    from mizzen.kernels.attention.flash_decode_triton import DecodeTiling, QKVPrep
    from mizzen.kernels.attention.split_plan import SplitSchedule
    from mizzen.kernels.nvrtc import KernelSpec

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
HEAD_DIMS = (32, 64, 128, 256)
MAX_GQA_GROUP_SIZE = 16
"""Maximum number of query heads that share a KV head."""
PROGRAMS = 256
"""Number of programs (one per row, KV head and split) that is enough to fill the GPU."""
SPLITS = ((8, 32), (MAX_GQA_GROUP_SIZE, 16))
"""Maximum number of splits in the Triton kernel, as pairs (maximum GQA group size, maximum number of splits).
The number is limited because the last program of each row and KV head merges the sums of all splits."""
MIN_WORKSPACE_PROGRAMS = 1024
"""Minimum size of the workspace, in programs; this is enough for all batches with equal splits."""


def unsupported_reason(geometry: Geometry, kv: KVFormat) -> str | None:
    """Return the reason why this backend does not support a KV cache or model; None if it does."""
    reason = find_unmet_requirement(
        kv,
        geometry.head_dim,
        min_capability=8,
        dtypes=DTYPES,
        dtype_names="bfloat16, float16 or float8",
        head_dims=HEAD_DIMS,
    )
    if reason is not None:
        return reason
    if geometry.gqa_group_size > MAX_GQA_GROUP_SIZE:
        return f"at most {MAX_GQA_GROUP_SIZE} query heads may share a KV head, not {geometry.gqa_group_size}"
    if geometry.softcap is not None:
        return "it does not support attn_logit_softcapping"
    return None


def split_count(rows: int, kv_heads: int, groups: int) -> int:
    """Return the number of splits of each row in the Triton kernel, for a batch of `rows` rows.

    `groups` is the number of query heads per KV head.
    """
    splits, most = 1, next(programs for heads, programs in SPLITS if groups <= heads)
    while splits < most and rows * kv_heads * splits < PROGRAMS:
        splits *= 2
    # A batch that barely fills the GPU has a shorter tail if every row is split in two.
    return max(splits, 2) if rows * kv_heads <= PROGRAMS else splits


def pack_slots_and_lengths(slots: Int64, lengths: Int32) -> Int32:
    """Return slots and lengths as one array, so that a single copy brings both to the device.

    The array is int32 [2, rows rounded up to a multiple of 4], so both start at a multiple of 16 bytes. With
    another alignment, Triton would compile the kernel again while a request waits.
    """
    rows = len(slots)
    numbers = np.zeros((2, -(-rows // 4) * 4), np.int32)
    numbers[0, :rows], numbers[1, :rows] = slots, lengths
    return numbers


class FlashDecodeBatch:
    """Planned attention of a decode batch."""

    def __init__(
        self,
        backend: FlashDecodeAttention,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
        plans: Mapping[int | None, torch.Tensor] | None = None,
    ) -> None:
        """Plan a batch; `plans` maps each window to its plan of length-aware splits.

        Without `plans`, each row is divided into equal splits.
        """
        self.backend = backend
        self.plans = plans
        self.slots, self.lengths, self.table = slots, lengths, table
        self.tiling = backend.tiling(len(slots))

    def __call__(self, layer: int, q: torch.Tensor, k: object, v: object, out: torch.Tensor) -> None:
        """Compute the attention of queries [rows, heads, d] after RoPE; all keys and values are cached."""
        self.attend(layer, q, None, out)

    def fuse_qkv_prep(self, slot_mapping: torch.Tensor) -> FusedDecode:
        """Return a fused decode that stores new keys and values in KV slots `slot_mapping` (int64 [rows])."""
        from mizzen.kernels.attention.flash_decode_triton import QKVPrep
        from mizzen.kernels.attention.qk_norm_rope import qk_norm_rope

        def run(
            layer: int,
            qkv: torch.Tensor,
            norms: tuple[torch.Tensor, torch.Tensor] | None,
            epsilon: float,
            cos: torch.Tensor,
            sin: torch.Tensor,
            out: torch.Tensor,
        ) -> None:
            if norms is not None and norms[0].dtype != qkv.dtype and self.backend.uses_mma:
                # This kernel reads only weights in the dtype of the queries.
                keys, values = self.backend.kv.keys[layer], self.backend.kv.values[layer]
                q = qk_norm_rope(qkv, norms, epsilon, cos, sin, slot_mapping, keys, values)
                self.attend(layer, q, None, out)
                return
            qkv_prep = QKVPrep(norms=norms, epsilon=epsilon, cos=cos, sin=sin, slot_mapping=slot_mapping)
            self.attend(layer, qkv, qkv_prep, out)

        return run

    def attend(self, layer: int, q: torch.Tensor, qkv_prep: QKVPrep | None, out: torch.Tensor) -> None:
        """Run the kernel for one layer, and write the result to `out` [rows, heads, d].

        If `qkv_prep` is given, `q` holds raw QKV projections [rows, (heads + 2 * kv_heads) * d]; otherwise it
        holds queries after RoPE, [rows, heads, d].
        """
        from mizzen.kernels.attention.flash_decode_triton import LayerKV

        kv = self.backend.kv
        cache = LayerKV(
            keys=kv.keys[layer],
            values=kv.values[layer],
            slots=self.slots,
            lengths=self.lengths,
            table=self.table,
            page_size=kv.page_size,
            score_scale=self.backend.geometry.score_scale,
            sinks=None if self.backend.sinks is None else self.backend.sinks[layer],
        )
        backend, window = self.backend, self.backend.geometry.windows[layer]
        split_plan = {} if self.plans is None else {"items": self.plans[window]}
        backend.kernel(q, qkv_prep, cache, out, window, self.tiling, backend.workspace, **split_plan)


class FlashDecodeAttention(AttentionBackend):
    """Backend for decodes: one kernel call per layer computes the attention output from raw QKV."""

    def __init__(self, geometry: Geometry, kv: PagedKV) -> None:
        """Select the kernel and allocate its workspace.

        Raises:
            ValueError: the device, dtype or geometry is not supported.
        """
        super().__init__(geometry, kv)
        if reason := unsupported_reason(geometry, kv):
            raise unsupported_error("attention split", reason)
        from mizzen.kernels.attention import flash_decode_mma, flash_decode_triton, split_plan

        device, size = kv.keys.device, geometry.head_dim
        self.uses_mma = flash_decode_mma.supports(kv.keys[0], geometry.gqa_group_size)
        self.kernel: Callable[..., None] = (
            flash_decode_mma.attend if self.uses_mma else flash_decode_triton.attend
        )
        self.sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        self.blocks_per_sm = flash_decode_mma.BLOCKS_PER_SM[size, kv.dtype] if self.uses_mma else 0
        self.windows = tuple(dict.fromkeys(geometry.windows))
        self.sinks = None if kv.sinks is None else kv.sinks.float() * flash_decode_triton.LOG2E
        """Scores of the attention sinks, times log2(e), float32 [layers, heads]; None for a model without."""
        # Kernels run one after another, so all layers and batches share one workspace.
        room = max(
            MIN_WORKSPACE_PROGRAMS,
            split_plan.max_partial_results(geometry.kv_heads, self.sm_count, self.blocks_per_sm),
        )
        self.workspace = flash_decode_triton.SplitWorkspace.allocate(
            room, room, geometry.gqa_group_size, size, device
        )

    def kernel_specs(self, *, norm: bool) -> set[KernelSpec]:
        """Return the specs of the decode kernels with equal and with length-aware splits."""
        if not self.uses_mma:
            return set()
        from mizzen.kernels.attention import flash_decode_mma

        keys, page = self.kv.keys[0], self.kv.page_size
        group, sinks = self.geometry.gqa_group_size, self.sinks is not None
        return flash_decode_mma.kernel_specs(keys, group, page, self.windows, norm=norm, sinks=sinks)

    def tiling(self, rows: int) -> DecodeTiling:
        """Return the tiling of a batch of `rows` rows."""
        from mizzen.kernels.attention import flash_decode_mma, flash_decode_triton

        if self.uses_mma:
            return flash_decode_mma.select_tiling(rows, self.kv.keys[0])
        splits = split_count(rows, self.geometry.kv_heads, self.geometry.gqa_group_size)
        # Four warps have too few registers for a block of larger heads: 114 us for one row instead of 10.
        warps, deep = (8, 2) if self.geometry.head_dim > 128 else (4, 3)
        return flash_decode_triton.DecodeTiling(
            splits=splits, block=64, warps=warps, stages=0 if splits > 2 else deep
        )

    def plan_decode(self, rows: DecodeRows) -> PlannedAttention:
        """Plan a batch of decodes."""
        sent = copy_to_device(pack_slots_and_lengths(rows.slots, rows.lengths), self.kv.keys.device)
        slots, lengths = sent[:, : len(rows.slots)]
        by_lengths = self.uses_mma and self.length_splits_are_faster(len(rows.lengths), rows.lengths)
        plan = self.plan_length_splits_on_device if by_lengths else self.plan_decode_on_device
        return plan(slots, lengths, rows.pages.device)

    def plan_decode_on_device(
        self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> PlannedAttention:
        """Plan a batch of decodes from device tensors only; may be captured in a graph."""
        return FlashDecodeBatch(self, slots, lengths, table)

    @property
    def concurrent_splits(self) -> int:
        """Number of splits that run at once; 0 if length-aware splits are not supported."""
        return self.sm_count * self.blocks_per_sm

    def schedule(self, rows: int) -> SplitSchedule:
        """Return the schedule of length-aware splits for a batch of `rows` rows."""
        from mizzen.kernels.attention.split_plan import make_schedule

        return make_schedule(rows, self.geometry.kv_heads, self.sm_count, self.blocks_per_sm)

    def length_splits_are_faster(self, rows: int, lengths: Int32) -> bool:
        """Return whether length-aware splits are faster than equal ones for a batch padded to `rows` rows."""
        from mizzen.kernels.attention.split_plan import is_faster

        return any(is_faster(lengths, window, self.schedule(rows)) for window in self.windows)

    def plan_length_splits_on_device(
        self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> PlannedAttention:
        """Plan a batch of decodes with length-aware splits; may be captured in a graph."""
        from mizzen.kernels.attention.split_plan import plan_splits

        schedule = self.schedule(len(slots))
        plans = {window: plan_splits(lengths, window, schedule) for window in self.windows}
        return FlashDecodeBatch(self, slots, lengths, table, plans)

    def plan_prefill(self, chunks: tuple[QueryChunk, ...], pages: PageTable) -> PlannedAttention:
        """Raise an error, because this backend supports only decodes.

        Raises:
            ValueError: always.
        """
        raise ValueError("attention split supports only decodes: choose another for --attention-prefill")
