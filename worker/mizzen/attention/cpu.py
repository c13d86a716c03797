# SPDX-License-Identifier: Apache-2.0
"""Attention backend for the CPU.

Attention on a CPU is bound by memory traffic. So KV is read in place where possible, and a prefix that
several rows share is read only once.
"""

from __future__ import annotations

import numpy as np
import torch

from mizzen.attention.base import (
    AttentionBackend,
    DecodeRows,
    Geometry,
    PagedKV,
    PageTable,
    PlannedAttention,
    QueryChunk,
)
from mizzen.attention.prefix_spans import KVSpans, find_shared_spans
from mizzen.attention.reference import ReferenceAttention, group_queries

flash_with_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""PyTorch's CPU kernel for scaled_dot_product_attention.

It is called directly, because scaled_dot_product_attention does not return log-sum-exps. The kernel maps
q [batch, heads, n, d] and k, v [batch, heads, m, d] of any strides to out [batch, heads, n, d] and
log-sum-exps [batch, heads, n].
"""


class CpuAttention(AttentionBackend):
    """CPU backend that attends to shared KV spans separately and merges the results by their log-sum-exps.

    The reference backend serves models with a softcap or attention sinks, and layers whose sliding window is
    shorter than the longest row of the batch.
    """

    def __init__(self, geometry: Geometry, kv: PagedKV) -> None:
        super().__init__(geometry, kv)
        self.reference = ReferenceAttention(geometry, kv)
        self.needs_reference = geometry.softcap is not None or geometry.has_sinks
        """Whether the reference backend serves all layers."""

    def plan_decode(self, rows: DecodeRows) -> PlannedAttention:
        """Plan a batch of decodes."""
        longest = int(rows.lengths.max())
        full = CpuDecode(self.geometry, self.kv, rows) if self.any_full(longest) else None
        windowed = self.reference.plan_decode(rows) if self.any_windowed(longest) else None
        return self.by_layer(longest, full, windowed)

    def plan_prefill(self, chunks: tuple[QueryChunk, ...], pages: PageTable) -> PlannedAttention:
        """Plan prefill chunks."""
        longest = max(chunk.end for chunk in chunks)
        full = CpuPrefill(self.geometry, self.kv, chunks, pages) if self.any_full(longest) else None
        windowed = self.reference.plan_prefill(chunks, pages) if self.any_windowed(longest) else None
        return self.by_layer(longest, full, windowed)

    def any_full(self, longest: int) -> bool:
        """Return whether this backend's own kernels serve any layer for `longest` tokens."""
        return not self.needs_reference and any(
            window is None or window >= longest for window in self.geometry.windows
        )

    def any_windowed(self, longest: int) -> bool:
        """Return whether any layer needs the reference backend for `longest` tokens."""
        return self.needs_reference or any(
            window is not None and window < longest for window in self.geometry.windows
        )

    def by_layer(
        self, longest: int, full: PlannedAttention | None, windowed: PlannedAttention | None
    ) -> PlannedAttention:
        """Return a plan that uses `windowed` if the layer's window is below `longest` tokens, else `full`."""
        if windowed is None and full is not None:
            return full

        def run(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
            window = self.geometry.windows[layer]
            plan = windowed if full is None or (window is not None and window < longest) else full
            if plan is not None:
                plan(layer, q, k, v, out)

        return run


class PartialResults:
    """Partial attention results of a batch, grouped in levels; a level holds at most one result per token.

    A level's results are [kv_heads, tokens * group size, head_dim]: tokens are in the order of the sorted
    rows of `KVSpans`, and query heads that share a KV head are adjacent.
    """

    def __init__(self, geometry: Geometry, levels: int, tokens: int, dtype: torch.dtype) -> None:
        self.geometry = geometry
        rows = tokens * geometry.gqa_group_size
        # Unfilled entries have the weight exp(-inf) and must be finite.
        self.outs = torch.zeros(levels, geometry.kv_heads, rows, geometry.head_dim, dtype=dtype)
        self.lse = torch.full((levels, geometry.kv_heads, rows), -torch.inf)

    def attend_span(
        self, level: int, first: int, last: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Compute the attention of tokens first..last-1 to a whole span, and store the results in `level`.

        q is [kv_heads, tokens * group size, d]; keys and values are [m, kv_heads, d].
        """
        rows = slice(first * self.geometry.gqa_group_size, last * self.geometry.gqa_group_size)
        out, lse = flash_with_lse(
            q[:, rows][None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            0.0,
            False,
            scale=self.geometry.score_scale,
        )
        self.outs[level, :, rows] = out[0]
        self.lse[level, :, rows] = lse[0]

    def by_token(self, level: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a level: its results [tokens, kv_heads, group size, d] and its log-sum-exps.

        The log-sum-exps are [tokens, kv_heads, group size].
        """
        kv_heads, group_size, size = (
            self.geometry.kv_heads,
            self.geometry.gqa_group_size,
            self.geometry.head_dim,
        )
        out = self.outs[level].view(kv_heads, -1, group_size, size).transpose(0, 1)
        return out, self.lse[level].view(kv_heads, -1, group_size).transpose(0, 1)

    def merge(self) -> torch.Tensor:
        """Merge all levels, weighted by their shares of the softmax sum; return [tokens, heads, d]."""
        weights = self.lse.softmax(dim=0).to(self.outs.dtype)
        merged = torch.einsum("lhr,lhrd->hrd", weights, self.outs)
        kv_heads, group_size, size = (
            self.geometry.kv_heads,
            self.geometry.gqa_group_size,
            self.geometry.head_dim,
        )
        return (
            merged.view(kv_heads, -1, group_size, size)
            .transpose(0, 1)
            .reshape(-1, kv_heads * group_size, size)
        )


def by_kv_head(q: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Rearrange q [tokens, heads, d] to [kv_heads, tokens * group size, d]."""
    shape = (len(q), geometry.kv_heads, geometry.gqa_group_size, geometry.head_dim)
    return q.reshape(shape).transpose(0, 1).reshape(geometry.kv_heads, -1, geometry.head_dim)


class CpuDecode:
    """Planned attention of a decode batch.

    Shared spans are read in place; all other KV slots are gathered into one padded tensor.
    """

    def __init__(self, geometry: Geometry, kv: PagedKV, rows: DecodeRows) -> None:
        self.geometry = geometry
        self.kv = kv
        lengths = rows.lengths.astype(np.int64)
        self.spans: KVSpans = find_shared_spans(
            rows.pages.host, rows.slots, lengths, kv.page_size, keep_last=True
        )
        count, width = len(rows.slots), max(len(kv_slots) for kv_slots in self.spans.leftover)
        kv_slots = np.zeros((count, width), np.int64)
        mask = np.full((count, 1, 1, width), -np.inf, np.float32)
        for row, rest in enumerate(self.spans.leftover):
            kv_slots[row, : len(rest)] = rest
            mask[row, ..., : len(rest)] = 0
        self.kv_slots = torch.from_numpy(kv_slots.ravel())
        self.mask = torch.from_numpy(mask).to(kv.keys.dtype)
        self.order = torch.from_numpy(self.spans.order)
        self.partial = PartialResults(geometry, self.spans.levels, count, kv.keys.dtype)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Compute the attention of q [rows, heads, d], and write it to `out` of the same shape."""
        keys, values, geometry = self.kv.keys[layer], self.kv.values[layer], self.geometry
        q = q[self.order]
        shape = (len(q), -1, geometry.kv_heads, geometry.head_dim)
        rest, lse = flash_with_lse(
            q.view(len(q), geometry.kv_heads, geometry.gqa_group_size, geometry.head_dim),
            keys.index_select(0, self.kv_slots).view(shape).transpose(1, 2),
            values.index_select(0, self.kv_slots).view(shape).transpose(1, 2),
            0.0,
            False,
            attn_mask=self.mask,
            scale=geometry.score_scale,
        )
        if not self.spans.spans:
            out[self.order] = rest.reshape(out.shape)
            return
        merged, merged_lse = self.partial.by_token(0)
        merged.copy_(rest)
        merged_lse.copy_(lse)
        q = by_kv_head(q, geometry)
        for span in self.spans.spans:
            span_slots = slice(span.start, span.start + span.count)
            self.partial.attend_span(
                span.level, span.first, span.last, q, keys[span_slots], values[span_slots]
            )
        out[self.order] = self.partial.merge()


class CpuPrefill:
    """Planned attention of prefill chunks.

    A chunk attends causally to its own tokens, and fully to the tokens that its slot already holds.
    """

    def __init__(
        self, geometry: Geometry, kv: PagedKV, chunks: tuple[QueryChunk, ...], pages: PageTable
    ) -> None:
        self.geometry = geometry
        self.kv = kv
        slots = np.array([chunk.slot for chunk in chunks], np.int64)
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        counts = np.array([chunk.count for chunk in chunks], np.int64)
        self.spans: KVSpans = find_shared_spans(pages.host, slots, starts, kv.page_size, keep_last=False)
        order = self.spans.order
        begins = np.cumsum(counts) - counts
        self.own = [slice(int(begins[row]), int(begins[row] + counts[row])) for row in order]
        """Slice of the batch's tokens that belongs to each sorted row."""
        self.edges = np.concatenate([[0], np.cumsum(counts[order])]).tolist()
        """Bounds of each sorted row in the list of all sorted rows' tokens: row i has the tokens
        edges[i]..edges[i + 1]-1 of this list."""
        self.tokens = torch.from_numpy(np.concatenate([np.arange(s.start, s.stop) for s in self.own]))
        self.leftover = [(row, torch.from_numpy(c)) for row, c in enumerate(self.spans.leftover) if len(c)]
        self.levels = self.spans.levels + bool(self.leftover)
        if self.levels > 1:
            self.partial = PartialResults(geometry, self.levels, int(counts.sum()), kv.keys.dtype)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Compute the attention of q [tokens, heads, d], and write it to `out` of the same shape.

        k and v [tokens, kv_heads, d] are the keys and values of the same tokens.
        """
        kv_heads = self.geometry.kv_heads
        if self.levels == 1:
            for span_slots in self.own:
                group_queries(out[span_slots], kv_heads).copy_(
                    self.attend_causally(q[span_slots], k[span_slots], v[span_slots])[0]
                )
            return
        merged, merged_lse = self.partial.by_token(0)
        for row, span_slots in enumerate(self.own):
            sorted_slots = slice(self.edges[row], self.edges[row + 1])
            own, lse = self.attend_causally(q[span_slots], k[span_slots], v[span_slots])
            merged[sorted_slots] = own.permute(2, 1, 0, 3)
            merged_lse[sorted_slots] = lse.permute(2, 1, 0)
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        q = by_kv_head(q[self.tokens], self.geometry)
        for span in self.spans.spans:
            span_slots = slice(span.start, span.start + span.count)
            first, last = self.edges[span.first], self.edges[span.last]
            self.partial.attend_span(span.level, first, last, q, keys[span_slots], values[span_slots])
        for row, kv_slots in self.leftover:
            first, last = self.edges[row], self.edges[row + 1]
            self.partial.attend_span(self.levels - 1, first, last, q, keys[kv_slots], values[kv_slots])
        out[self.tokens] = self.partial.merge()

    def attend_causally(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the causal attention of a chunk to itself: q [n, heads, d], k and v [n, kv_heads, d].

        Returns:
            The result [group size, kv_heads, n, d] and its log-sum-exps [group size, kv_heads, n].
        """
        queries = group_queries(q, self.geometry.kv_heads)
        shape = (len(queries), k.shape[1], len(k), k.shape[2])
        return flash_with_lse(
            queries,
            k.transpose(0, 1).expand(shape),
            v.transpose(0, 1).expand(shape),
            0.0,
            True,
            scale=self.geometry.score_scale,
        )
