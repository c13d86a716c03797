"""FlashAttention 3 (arXiv 2407.08608) over paged KV, as sgl-kernel builds it for Hopper.

Lengths and page table stay on the device, so that a captured graph follows them. The tiles of a batch of
decodes are scheduled once a step, not once a layer.
"""

from __future__ import annotations

import importlib
import importlib.util

import numpy as np
import torch

from mizzen.attention.base import (
    E4M3_LARGEST,
    AttentionBackend,
    QueryChunk,
    DecodeRows,
    Geometry,
    KVFormat,
    PagedKV,
    PageTable,
    PlannedAttention,
    unsupported_error,
    copy_to_device,
)
from mizzen.core.request import Int32

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
WIDEST_HEAD = 256
FLASH = "sgl_kernel.flash_attn"


def unsupported_reason(geometry: Geometry, kv: KVFormat) -> str | None:
    """Tell what keeps this backend from running here; None when nothing does."""
    device = kv.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "it needs a Hopper GPU"
    if kv.dtype not in DTYPES:
        return f"it needs bfloat16, float16 or float8, not {str(kv.dtype).removeprefix('torch.')}"
    if geometry.head_dim % 8 or geometry.head_dim > WIDEST_HEAD:
        return f"head_dim must be a multiple of 8 up to {WIDEST_HEAD}, not {geometry.head_dim}"
    if importlib.util.find_spec("sgl_kernel") is None:
        return "it needs the package sglang-kernel (pip install 'mizzen[gpu]')"
    try:
        importlib.import_module(FLASH)
    except (ImportError, OSError) as error:  # each version is built for one of PyTorch
        why = next(iter(str(error).splitlines()), repr(error))
        fitting = f"take the version that is built for PyTorch {torch.__version__}"
        return f"the package sglang-kernel does not load: {fitting} ({why})"
    return None


def flash_window(window: int | None, causal: bool) -> tuple[int, int]:
    """Return tokens seen to the left and to the right of a query; -1 is no limit."""
    return (-1, 0 if causal else -1) if window is None else (window - 1, 0)


class FlashAttention3(AttentionBackend):
    """One call for a batch of decodes, one for all prefill chunks."""

    def __init__(self, geometry: Geometry, kv: PagedKV) -> None:
        """Load the kernels.

        Raises:
            ValueError: the device, the precision or the shape of heads is none that they serve.
            ImportError: the package is broken.
        """
        super().__init__(geometry, kv)
        if why := unsupported_reason(geometry, kv):
            raise unsupported_error("attention fa3", why)
        from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

        self.flash = flash_attn_with_kvcache
        self.schedule = get_scheduler_metadata
        paged = (kv.keys.shape[0], -1, kv.page_size, geometry.kv_heads, geometry.head_dim)
        self.keys, self.values = kv.keys.view(paged), kv.values.view(paged)
        self.scales: torch.Tensor | None = None
        if kv.quantized and kv.key_scales:
            self.scales = torch.tensor(kv.key_scales, dtype=torch.float32, device=kv.keys.device)

    def queries(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Bring queries to the precision of the cache: the kernels multiply like with like.

        They go without the keys' scale, which would move them out of the format's range; `descale` has it.
        """
        if not self.kv.quantized:
            return q
        if self.scales is not None:
            q = q / self.kv.key_scales[layer]
        return q.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(self.kv.keys.dtype)

    def descale(self, layer: int, rows: int) -> torch.Tensor | None:
        """Return what products of queries and keys are multiplied by, float32 [rows, kv_heads]."""
        if self.scales is None:
            return None
        return self.scales[layer].expand(rows, self.geometry.kv_heads)

    def plan_decode(self, rows: DecodeRows) -> PlannedAttention:
        """Prepare a batch of decodes."""
        packed = copy_to_device(np.stack([rows.slots.astype(np.int32), rows.lengths]), self.kv.keys.device)
        return self.plan_decode_on_device(packed[0], packed[1], rows.pages.device)

    def plan_decode_on_device(self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> PlannedAttention:
        """Prepare a batch of decodes from what is on the device alone; may be captured in a graph.

        Args:
            slots: int32 [rows], rows of the page table.
            lengths: int32 [rows], tokens whose KV is read, the query's own included.
            table: int32 [slots, columns].
        """
        geometry, page = self.geometry, self.kv.page_size
        longest = table.shape[1] * page
        schedules = {
            window: self.schedule(
                batch_size=len(slots),
                max_seqlen_q=1,
                max_seqlen_k=longest,
                num_heads=geometry.heads,
                num_heads_k=geometry.kv_heads,
                headdim=geometry.head_dim,
                cache_seqlens=lengths,
                qkv_dtype=self.kv.keys.dtype,
                page_size=page,
                window_size=flash_window(window, causal=False),
            )
            for window in set(geometry.windows)
        }

        def run(layer: int, q: torch.Tensor, k: object, v: object, out: torch.Tensor) -> None:
            window = geometry.windows[layer]
            self.flash(
                self.queries(layer, q)[:, None],
                self.keys[layer],
                self.values[layer],
                cache_seqlens=lengths,
                cache_batch_idx=slots,
                page_table=table,
                window_size=flash_window(window, causal=False),
                scheduler_metadata=schedules[window],
                k_descale=self.descale(layer, len(slots)),
                out=out[:, None],
            )

        return run

    def plan_on_device(
        self,
        starts: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
        longest: int,
    ) -> PlannedAttention:
        """Prepare sequences of any lengths from what is on the device alone; may be captured in a graph."""
        geometry, page = self.geometry, self.kv.page_size
        schedules = {
            window: self.schedule(
                batch_size=len(slots),
                max_seqlen_q=longest,
                max_seqlen_k=table.shape[1] * page,
                num_heads=geometry.heads,
                num_heads_k=geometry.kv_heads,
                headdim=geometry.head_dim,
                cache_seqlens=lengths,
                qkv_dtype=self.kv.keys.dtype,
                cu_seqlens_q=starts,
                page_size=page,
                causal=True,
                window_size=flash_window(window, causal=True),
            )
            for window in set(geometry.windows)
        }

        def run(layer: int, q: torch.Tensor, k: object, v: object, out: torch.Tensor) -> None:
            window = geometry.windows[layer]
            self.flash(
                self.queries(layer, q),
                self.keys[layer],
                self.values[layer],
                cache_seqlens=lengths,
                cache_batch_idx=slots,
                page_table=table,
                cu_seqlens_q=starts,
                max_seqlen_q=longest,
                causal=True,
                window_size=flash_window(window, causal=True),
                scheduler_metadata=schedules[window],
                k_descale=self.descale(layer, len(slots)),
                out=out,
            )

        return run

    def plan_prefill(self, chunks: tuple[QueryChunk, ...], pages: PageTable) -> PlannedAttention:
        """Prepare prefill chunks as one batch of sequences of different lengths."""
        counts = np.array([chunk.count for chunk in chunks], np.int32)
        starts = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        ends: Int32 = np.array([chunk.end for chunk in chunks], np.int32)
        slots: Int32 = np.array([chunk.slot for chunk in chunks], np.int32)
        packed = copy_to_device(np.concatenate([starts, slots, ends]), self.kv.keys.device)
        where, which, lengths = packed.split([len(starts), len(slots), len(ends)])
        return self.plan_on_device(where, which, lengths, pages.device, int(counts.max()))
