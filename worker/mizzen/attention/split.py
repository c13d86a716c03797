"""Our own decode attention over paged KV, for decodes alone.

The kernel is `mizzen.kernels.paged` on Hopper for the shapes that it serves, else `mizzen.kernels.split`.

Lengths and page table stay on the device, so that a captured graph follows them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from mizzen.attention.base import (
    AttentionBackend,
    Chunk,
    DecodeRows,
    Geometry,
    KvKind,
    PagedKV,
    Pages,
    Projected,
    Run,
    not_here,
)

if TYPE_CHECKING:
    from mizzen.kernels.split import Projections, Tiling

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
HEADS = (32, 64, 128, 256)
GROUPS = 16
"""Most query heads that share a KV head."""
PROGRAMS = 256
"""Programs (of a row, a KV head and a part of the context) that are enough for the GPU."""
SPLITS = ((8, 32), (GROUPS, 16))
"""(query heads of a KV head, programs): how many share a row at most; the last merges all their sums."""
ROOM = 1024
"""Programs that the workspace has room for; both kernels need less where they split."""


def missing(geometry: Geometry, kv: KvKind) -> str | None:
    """Tell what keeps this backend from running here; None when nothing does."""
    device = kv.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
        return "it needs an NVIDIA GPU of compute capability 8.0 or above"
    if kv.dtype not in DTYPES:
        return f"it needs bfloat16, float16 or float8, not {str(kv.dtype).removeprefix('torch.')}"
    if geometry.head_dim not in HEADS:
        return f"head_dim must be one of {HEADS}, not {geometry.head_dim}"
    if geometry.groups > GROUPS:
        return f"at most {GROUPS} query heads may share a KV head, not {geometry.groups}"
    return None


def split_count(rows: int, kv_heads: int, groups: int) -> int:
    """Return how many programs share the context of one of `rows`, with so many query heads a KV head."""
    splits, most = 1, next(programs for heads, programs in SPLITS if groups <= heads)
    while splits < most and rows * kv_heads * splits < PROGRAMS:
        splits *= 2
    # A batch that fills the GPU only just has less of a tail in halves.
    return max(splits, 2) if rows * kv_heads <= PROGRAMS else splits


class SplitRun:
    """A planned batch of decodes."""

    def __init__(
        self, backend: SplitAttention, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> None:
        self.backend = backend
        self.slots, self.lengths, self.table = slots, lengths, table
        self.tiling = backend.tiling(len(slots))

    def __call__(self, layer: int, q: torch.Tensor, k: object, v: object, out: torch.Tensor) -> None:
        """Attend ready queries [rows, heads, d], with all keys and values in the cache."""
        self.attend(layer, q, None, out)

    def projected(self, cells: torch.Tensor) -> Projected:
        """Return attention from the raw projection; new keys and values go to `cells`."""
        from mizzen.kernels.split import Projections

        def run(
            layer: int,
            qkv: torch.Tensor,
            norms: tuple[torch.Tensor, torch.Tensor] | None,
            epsilon: float,
            cos: torch.Tensor,
            sin: torch.Tensor,
            out: torch.Tensor,
        ) -> None:
            how = Projections(norms=norms, epsilon=epsilon, cos=cos, sin=sin, cells=cells)
            self.attend(layer, qkv, how, out)

        return run

    def attend(self, layer: int, q: torch.Tensor, how: Projections | None, out: torch.Tensor) -> None:
        """Run the kernel for one layer."""
        from mizzen.kernels.split import Cache

        kv = self.backend.kv
        cache = Cache(
            keys=kv.keys[layer],
            values=kv.values[layer],
            slots=self.slots,
            lengths=self.lengths,
            table=self.table,
            page_size=kv.page_size,
        )
        window = self.backend.geometry.windows[layer]
        self.backend.kernel(q, how, cache, out, window, self.tiling, self.backend.workspace)


class SplitAttention(AttentionBackend):
    """One kernel a layer, from the projection to the attended values."""

    def __init__(self, geometry: Geometry, kv: PagedKV) -> None:
        """Check the device.

        Raises:
            ValueError: the device, the precision or the shape of heads is none that it serves.
        """
        super().__init__(geometry, kv)
        if why := missing(geometry, kv):
            raise not_here("attention split", why)
        from mizzen.kernels import paged, split

        self.paged = paged.serves(kv.keys[0], geometry.groups)
        self.kernel = paged.attend if self.paged else split.attend
        # Kernels follow one another, so that all share it.
        self.workspace = split.Workspace.allocate(
            ROOM, ROOM, geometry.groups, geometry.head_dim, kv.keys.device
        )

    def tiling(self, rows: int) -> Tiling:
        """Choose how to cut a batch."""
        from mizzen.kernels import paged, split

        if self.paged:
            return paged.tiling_of(rows, self.kv.keys[0])
        splits = split_count(rows, self.geometry.kv_heads, self.geometry.groups)
        # Four warps have too few registers for a block of larger heads: 114 us for one row instead of 10.
        warps, deep = (8, 2) if self.geometry.head_dim > 128 else (4, 3)
        return split.Tiling(splits=splits, block=64, warps=warps, stages=0 if splits > 2 else deep)

    def plan_decode(self, rows: DecodeRows) -> Run:
        """Prepare a batch of decodes."""
        packed = torch.from_numpy(np.stack([rows.slots.astype(np.int32), rows.lengths])).pin_memory()
        packed = packed.to(self.kv.keys.device, non_blocking=True)
        return self.plan_decode_on_device(packed[0], packed[1], rows.pages.device)

    def plan_decode_on_device(self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> Run:
        """Prepare a batch of decodes from what is on the device alone; may be captured in a graph."""
        return SplitRun(self, slots, lengths, table)

    def plan_prefill(self, chunks: tuple[Chunk, ...], pages: Pages) -> Run:
        """Refuse.

        Raises:
            ValueError: always.
        """
        raise ValueError("attention split serves decodes alone: choose another for --attention-prefill")
