"""Our own decode attention over paged KV, for decodes alone.

The kernel is `mizzen.kernels.attention.flash_decode_mma` on Hopper for the shapes that it serves, else `mizzen.kernels.attention.flash_decode_triton`.

Lengths and page table stay on the device, so that a captured graph follows them. `mizzen.kernels.attention.flash_decode_mma` also
cuts contexts by their lengths, as `mizzen.kernels.attention.split_plan` plans it on the device once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from mizzen.attention.base import (
    AttentionBackend,
    QueryChunk,
    DecodeRows,
    Geometry,
    KVFormat,
    PagedKV,
    PageTable,
    FusedDecode,
    PlannedAttention,
    unsupported_error,
    copy_to_device,
)
from mizzen.core.request import Int32, Int64

if TYPE_CHECKING:
    from mizzen.kernels.attention.flash_decode_triton import QKVPrep, Tiling
    from mizzen.kernels.attention.split_plan import Cut
    from mizzen.kernels.nvrtc import KernelSpec

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
HEADS = (32, 64, 128, 256)
GROUPS = 16
"""Most query heads that share a KV head."""
PROGRAMS = 256
"""Programs (of a row, a KV head and a part of the context) that are enough for the GPU."""
SPLITS = ((8, 32), (GROUPS, 16))
"""(query heads of a KV head, programs): how many share a row at most; the last merges all their sums."""
MIN_WORKSPACE_PROGRAMS = 1024
"""Programs that the workspace has room for; both kernels need less where they split."""


def unsupported_reason(geometry: Geometry, kv: KVFormat) -> str | None:
    """Tell what keeps this backend from running here; None when nothing does."""
    device = kv.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
        return "it needs an NVIDIA GPU of compute capability 8.0 or above"
    if kv.dtype not in DTYPES:
        return f"it needs bfloat16, float16 or float8, not {str(kv.dtype).removeprefix('torch.')}"
    if geometry.head_dim not in HEADS:
        return f"head_dim must be one of {HEADS}, not {geometry.head_dim}"
    if geometry.gqa_group_size > GROUPS:
        return f"at most {GROUPS} query heads may share a KV head, not {geometry.gqa_group_size}"
    return None


def split_count(rows: int, kv_heads: int, groups: int) -> int:
    """Return how many programs share the context of one of `rows`, with so many query heads a KV head."""
    splits, most = 1, next(programs for heads, programs in SPLITS if groups <= heads)
    while splits < most and rows * kv_heads * splits < PROGRAMS:
        splits *= 2
    # A batch that fills the GPU only just has less of a tail in halves.
    return max(splits, 2) if rows * kv_heads <= PROGRAMS else splits


def pack_slots_and_lengths(slots: Int64, lengths: Int32) -> Int32:
    """Return slots, then lengths, [2, rows and up to three more], for one copy to the device.

    Both begin at a multiple of 16 bytes: Triton compiles kernels anew for addresses that are none, and would
    while a request waits.
    """
    rows = len(slots)
    numbers = np.zeros((2, -(-rows // 4) * 4), np.int32)
    numbers[0, :rows], numbers[1, :rows] = slots, lengths
    return numbers


class FlashDecodeBatch:
    """A planned batch of decodes."""

    def __init__(
        self,
        backend: FlashDecodeAttention,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
        plans: Mapping[int | None, torch.Tensor] | None = None,
    ) -> None:
        """Take a batch, and by window how its contexts are cut, where not all alike."""
        self.backend = backend
        self.plans = plans
        self.slots, self.lengths, self.table = slots, lengths, table
        self.tiling = backend.tiling(len(slots))

    def __call__(self, layer: int, q: torch.Tensor, k: object, v: object, out: torch.Tensor) -> None:
        """StepAttention ready queries [rows, heads, d], with all keys and values in the cache."""
        self.attend(layer, q, None, out)

    def fuse_qkv_prep(self, slot_mapping: torch.Tensor) -> FusedDecode:
        """Return attention from the raw projection; new keys and values go to `slot_mapping`."""
        from mizzen.kernels.attention.flash_decode_triton import QKVPrep

        def run(
            layer: int,
            qkv: torch.Tensor,
            norms: tuple[torch.Tensor, torch.Tensor] | None,
            epsilon: float,
            cos: torch.Tensor,
            sin: torch.Tensor,
            out: torch.Tensor,
        ) -> None:
            how = QKVPrep(norms=norms, epsilon=epsilon, cos=cos, sin=sin, slot_mapping=slot_mapping)
            self.attend(layer, qkv, how, out)

        return run

    def attend(self, layer: int, q: torch.Tensor, how: QKVPrep | None, out: torch.Tensor) -> None:
        """PlannedAttention the kernel for one layer."""
        from mizzen.kernels.attention.flash_decode_triton import Cache

        kv = self.backend.kv
        cache = LayerKV(
            keys=kv.keys[layer],
            values=kv.values[layer],
            slots=self.slots,
            lengths=self.lengths,
            table=self.table,
            page_size=kv.page_size,
        )
        backend, window = self.backend, self.backend.geometry.windows[layer]
        more = {} if self.plans is None else {"items": self.plans[window]}
        backend.kernel(q, how, cache, out, window, self.tiling, backend.workspace, **more)


class FlashDecodeAttention(AttentionBackend):
    """One kernel a layer, from the projection to the attended values."""

    def __init__(self, geometry: Geometry, kv: PagedKV) -> None:
        """Check the device.

        Raises:
            ValueError: the device, the precision or the shape of heads is none that it serves.
        """
        super().__init__(geometry, kv)
        if why := unsupported_reason(geometry, kv):
            raise unsupported_error("attention split", why)
        from mizzen.kernels.attention import flash_decode_mma, flash_decode_triton, split_plan

        device, size = kv.keys.device, geometry.head_dim
        self.paged = flash_decode_mma.serves(kv.keys[0], geometry.gqa_group_size)
        self.kernel: Callable[..., None] = (
            flash_decode_mma.attend if self.paged else flash_decode_triton.attend
        )
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.resident = flash_decode_mma.RESIDENT[size, kv.dtype] if self.paged else 0
        self.windows = tuple(dict.fromkeys(geometry.windows))
        # Kernels follow one another, so that all share it.
        room = max(MIN_WORKSPACE_PROGRAMS, split_plan.max_partial_results(geometry.kv_heads, self.processors, self.resident))
        self.workspace = flash_decode_triton.SplitWorkspace.allocate(room, room, geometry.gqa_group_size, size, device)

    def kernel_specs(self, *, norm: bool) -> set[KernelSpec]:
        """Return what decodes are compiled from, eager ones and captured, cut plainly and by lengths."""
        if not self.paged:
            return set()
        from mizzen.kernels.attention import flash_decode_mma

        keys, page = self.kv.keys[0], self.kv.page_size
        return flash_decode_mma.kernels(keys, self.geometry.gqa_group_size, page, self.windows, norm=norm)

    def tiling(self, rows: int) -> DecodeTiling:
        """Choose how to cut a batch."""
        from mizzen.kernels.attention import flash_decode_mma, flash_decode_triton

        if self.paged:
            return flash_decode_mma.select_tiling(rows, self.kv.keys[0])
        splits = split_count(rows, self.geometry.kv_heads, self.geometry.gqa_group_size)
        # Four warps have too few registers for a block of larger heads: 114 us for one row instead of 10.
        warps, deep = (8, 2) if self.geometry.head_dim > 128 else (4, 3)
        return flash_decode_triton.DecodeTiling(
            splits=splits, block=64, warps=warps, stages=0 if splits > 2 else deep
        )

    def plan_decode(self, rows: DecodeRows) -> PlannedAttention:
        """Prepare a batch of decodes."""
        sent = copy_to_device(pack_slots_and_lengths(rows.slots, rows.lengths), self.kv.keys.device)
        slots, lengths = sent[:, : len(rows.slots)]
        by_lengths = self.paged and self.length_splits_are_faster(len(rows.lengths), rows.lengths)
        plan = self.plan_length_splits_on_device if by_lengths else self.plan_decode_on_device
        return plan(slots, lengths, rows.pages.device)

    def plan_decode_on_device(self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> PlannedAttention:
        """Prepare a batch of decodes from what is on the device alone; may be captured in a graph."""
        return FlashDecodeBatch(self, slots, lengths, table)

    @property
    def concurrent_splits(self) -> int:
        """Parts of contexts that run at once, where it cuts by lengths."""
        return self.processors * self.resident

    def cut(self, rows: int) -> Cut:
        """Return how a batch may be cut by its lengths."""
        from mizzen.kernels.attention.split_plan import make_schedule

        return make_schedule(rows, self.geometry.kv_heads, self.processors, self.resident)

    def length_splits_are_faster(self, rows: int, lengths: Int32) -> bool:
        """Tell whether a batch of so many rows has some that are worth more parts than others."""
        from mizzen.kernels.attention.split_plan import pays

        return any(pays(lengths, window, self.cut(rows)) for window in self.windows)

    def plan_length_splits_on_device(self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> PlannedAttention:
        """Prepare a batch of decodes that is cut by its lengths; may be captured in a graph."""
        from mizzen.kernels.attention.split_plan import plan

        cut = self.cut(len(slots))
        plans = {window: plan(lengths, window, cut) for window in self.windows}
        return FlashDecodeBatch(self, slots, lengths, table, plans)

    def plan_prefill(self, chunks: tuple[QueryChunk, ...], pages: PageTable) -> PlannedAttention:
        """Refuse.

        Raises:
            ValueError: always.
        """
        raise ValueError("attention split serves decodes alone: choose another for --attention-prefill")
