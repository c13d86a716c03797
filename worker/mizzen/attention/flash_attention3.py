# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 (arXiv 2407.08608) over paged KV, from sgl-kernel's build for Hopper.

Kernels read the lengths and the page table on the device, so each replay of a captured graph uses their
current values. The tiles of a decode batch are scheduled once per step, not once per layer.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mizzen.attention.base import (
    E4M3_LARGEST,
    AttentionBackend,
    DecodeRows,
    Geometry,
    KVFormat,
    PagedKV,
    PageTable,
    PlannedAttention,
    QueryChunk,
    copy_to_device,
)
from mizzen.attention.requirements import find_unmet_requirement, unsupported_error
from mizzen.core.request import Int32

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
MAX_HEAD_DIM = 256
PACKAGE = "sgl_kernel.flash_attn"


def unsupported_reason(geometry: Geometry, kv: KVFormat) -> str | None:
    """Return the reason why this backend does not support a KV cache or model; None if it does."""
    reason = find_unmet_requirement(
        kv, geometry.head_dim, hopper=True, dtypes=DTYPES, dtype_names="bfloat16, float16 or float8"
    )
    if reason is not None:
        return reason
    if geometry.head_dim % 8 or geometry.head_dim > MAX_HEAD_DIM:
        return f"head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}, not {geometry.head_dim}"
    return package_fault()


def package_fault() -> str | None:
    """Return the reason why the package with the kernels cannot be used; None if it can."""
    if importlib.util.find_spec("sgl_kernel") is None:
        return "it needs the package sglang-kernel (pip install 'mizzen[gpu]')"
    try:
        importlib.import_module(PACKAGE)
    except (ImportError, OSError) as error:  # each version is built for one version of PyTorch
        cause = next(iter(str(error).splitlines()), repr(error))
        advice = f"install the version that is built for PyTorch {torch.__version__}"
        return f"the package sglang-kernel does not load: {advice} ({cause})"
    return None


def flash_window(window: int | None, causal: bool) -> tuple[int, int]:
    """Return the numbers of tokens that a query sees to its left and right; -1 means no limit."""
    return (-1, 0 if causal else -1) if window is None else (window - 1, 0)


@dataclass(frozen=True, slots=True)
class FreshPrompts:
    """Attention of whole prompts without cached prefixes.

    The kernel reads keys and values of the batch by TMA, which is 5 to 14 % faster than from pages of 16
    tokens (for prompts of 8,192 tokens on an H100). Calls without them read the cache.
    """

    backend: FlashAttention3
    starts: torch.Tensor
    """Index of the first token of each prompt, and the end of the last one, int32 [prompts + 1]."""
    longest: int
    """Number of tokens of the longest prompt."""
    plan_cached: Callable[[], PlannedAttention]
    """Function that returns the same attention from the cache, planned at its first call."""
    reads_batch_kv: bool = True

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Compute attention; see `PlannedAttention`."""
        if k is None or v is None:
            self.plan_cached()(layer, q, k, v, out)
            return
        backend = self.backend
        backend.prompt_kernel(
            q,
            k,
            v,
            self.starts,
            self.starts,
            self.longest,
            self.longest,
            causal=True,
            window_size=flash_window(backend.geometry.windows[layer], causal=True),
            softmax_scale=backend.geometry.score_scale,
            softcap=backend.geometry.softcap or 0.0,
            sinks=None if backend.sinks is None else backend.sinks[layer],
            out=out,
        )


class FlashAttention3(AttentionBackend):
    """FlashAttention 3 backend: per layer, one kernel call for all decodes and one for all prefill chunks."""

    def __init__(self, geometry: Geometry, kv: PagedKV) -> None:
        """Load the kernels.

        Args:
            geometry: Shape of the model's attention.
            kv: The KV cache.

        Raises:
            ValueError: the device, dtype or geometry is not supported.
            ImportError: the package is broken.
        """
        super().__init__(geometry, kv)
        if reason := unsupported_reason(geometry, kv):
            raise unsupported_error("attention fa3", reason)
        from sgl_kernel.flash_attn import (
            flash_attn_varlen_func,
            flash_attn_with_kvcache,
            get_scheduler_metadata,
        )

        self.attention_kernel, self.prompt_kernel = flash_attn_with_kvcache, flash_attn_varlen_func
        self.schedule = get_scheduler_metadata
        paged = (kv.keys.shape[0], -1, kv.page_size, geometry.kv_heads, geometry.head_dim)
        self.keys, self.values = kv.keys.view(paged), kv.values.view(paged)
        self.sinks = None if kv.sinks is None else kv.sinks.to(torch.bfloat16)
        """Attention sinks [layers, heads]; the kernels read no other dtype."""
        self.scales: torch.Tensor | None = None
        if kv.quantized and kv.key_scales:
            self.scales = torch.tensor(kv.key_scales, dtype=torch.float32, device=kv.keys.device)

    def cast_queries(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Cast queries q [tokens, heads, d] to the dtype of the cache, because kernels need equal dtypes.

        The caller has multiplied the queries by the layer's key scale, which could move them out of the range
        of an 8-bit format. So this method divides 8-bit queries by that scale, and the kernel multiplies the
        query-key products by the scale instead (`descale`).
        """
        if not self.kv.quantized:
            return q
        if self.scales is not None:
            q = q / self.kv.key_scales[layer]
        return q.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(self.kv.keys.dtype)

    def descale(self, layer: int, rows: int) -> torch.Tensor | None:
        """Return the factor for query-key products, float32 [rows, kv_heads]; None if keys have no scales."""
        if self.scales is None:
            return None
        return self.scales[layer].expand(rows, self.geometry.kv_heads)

    def plan_decode(self, rows: DecodeRows) -> PlannedAttention:
        """Plan a batch of decodes."""
        packed = copy_to_device(np.stack([rows.slots.astype(np.int32), rows.lengths]), self.kv.keys.device)
        return self.plan_decode_on_device(packed[0], packed[1], rows.pages.device)

    def plan_decode_on_device(
        self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> PlannedAttention:
        """Plan a batch of decodes from device tensors only; may be captured in a graph.

        Args:
            slots: Row of the page table for each decode row, int32 [rows].
            lengths: Number of tokens whose KV each row reads, including the query token itself, int32 [rows].
            table: Page table, int32 [slots, columns].
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
                has_softcap=geometry.softcap is not None,
            )
            for window in set(geometry.windows)
        }

        def run(layer: int, q: torch.Tensor, k: object, v: object, out: torch.Tensor) -> None:
            window = geometry.windows[layer]
            self.attention_kernel(
                self.cast_queries(layer, q)[:, None],
                self.keys[layer],
                self.values[layer],
                cache_seqlens=lengths,
                cache_batch_idx=slots,
                page_table=table,
                window_size=flash_window(window, causal=False),
                scheduler_metadata=schedules[window],
                k_descale=self.descale(layer, len(slots)),
                softmax_scale=geometry.score_scale,
                softcap=geometry.softcap or 0.0,
                sinks=None if self.sinks is None else self.sinks[layer],
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
        *,
        split: bool = True,
    ) -> PlannedAttention:
        """Plan sequences of any lengths from device tensors only; may be captured in a graph.

        Args:
            starts: Index of the first query of each sequence, and the end of the last sequence, int32
                [sequences + 1].
            slots: Row of the page table for each sequence, int32 [sequences].
            lengths: Number of tokens whose KV the last query of each sequence reads, int32 [sequences].
            table: Page table, int32 [slots, columns].
            longest: Maximum number of queries in a sequence.
            split: Whether the kernel may split contexts among thread blocks.
        """
        geometry, page = self.geometry, self.kv.page_size
        splits = {} if split else {"num_splits": 1}
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
                has_softcap=geometry.softcap is not None,
                **splits,
            )
            for window in set(geometry.windows)
        }

        def run(layer: int, q: torch.Tensor, k: object, v: object, out: torch.Tensor) -> None:
            window = geometry.windows[layer]
            self.attention_kernel(
                self.cast_queries(layer, q),
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
                softmax_scale=geometry.score_scale,
                softcap=geometry.softcap or 0.0,
                sinks=None if self.sinks is None else self.sinks[layer],
                out=out,
                **splits,
            )

        return run

    def plan_prefill(self, chunks: tuple[QueryChunk, ...], pages: PageTable) -> PlannedAttention:
        """Plan prefill chunks as one batch of sequences of different lengths."""
        counts = np.array([chunk.count for chunk in chunks], np.int32)
        starts = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        ends: Int32 = np.array([chunk.end for chunk in chunks], np.int32)
        slots: Int32 = np.array([chunk.slot for chunk in chunks], np.int32)
        packed = copy_to_device(np.concatenate([starts, slots, ends]), self.kv.keys.device)
        starts_on_device, slots_on_device, lengths = packed.split([len(starts), len(slots), len(ends)])
        longest = int(counts.max())

        @functools.cache
        def plan_cached() -> PlannedAttention:
            return self.plan_on_device(starts_on_device, slots_on_device, lengths, pages.device, longest)

        if self.kv.quantized or any(chunk.start for chunk in chunks):
            return plan_cached()  # quantized keys must be read as later steps will read them
        return FreshPrompts(self, starts_on_device, longest, plan_cached)
