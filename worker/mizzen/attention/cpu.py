"""Attention for the CPU, where memory traffic decides: KV is read in place and shared prefixes once."""

from __future__ import annotations

import numpy as np
import torch

from mizzen.attention.base import AttentionBackend, QueryChunk, DecodeRows, Geometry, PagedKV, PageTable, PlannedAttention
from mizzen.attention.prefix_spans import Spans, find_shared_spans
from mizzen.attention.reference import ReferenceAttention, grouped

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""PyTorch's CPU kernel behind scaled_dot_product_attention; called by name because it returns log-sum-exps.

q [batch, heads, n, d], k, v [batch, heads, m, d], any strides → out [batch, heads, n, d], [batch, heads, n].
"""


class CpuAttention(AttentionBackend):
    """Merges attention over spans of consecutive cells by their log-sum-exps.

    Layers whose sliding window cuts into a batch are left to the reference backend.
    """

    def __init__(self, geometry: Geometry, kv: PagedKV) -> None:
        super().__init__(geometry, kv)
        self.reference = ReferenceAttention(geometry, kv)

    def plan_decode(self, rows: DecodeRows) -> PlannedAttention:
        """Prepare a batch of decodes."""
        longest = int(rows.lengths.max())
        whole = CpuDecode(self.geometry, self.kv, rows) if self.any_whole(longest) else None
        cut = self.reference.plan_decode(rows) if self.any_cut(longest) else None
        return self.by_layer(longest, whole, cut)

    def plan_prefill(self, chunks: tuple[QueryChunk, ...], pages: PageTable) -> PlannedAttention:
        """Prepare prefill chunks."""
        longest = max(chunk.end for chunk in chunks)
        whole = CpuPrefill(self.geometry, self.kv, chunks, pages) if self.any_whole(longest) else None
        cut = self.reference.plan_prefill(chunks, pages) if self.any_cut(longest) else None
        return self.by_layer(longest, whole, cut)

    def any_whole(self, longest: int) -> bool:
        """Tell whether a layer's window takes in all of a batch of this length."""
        return any(window is None or window >= longest for window in self.geometry.windows)

    def any_cut(self, longest: int) -> bool:
        """Tell whether a layer's window cuts into a batch of this length."""
        return any(window is not None and window < longest for window in self.geometry.windows)

    def by_layer(self, longest: int, whole: PlannedAttention | None, cut: PlannedAttention | None) -> PlannedAttention:
        """Choose for each layer by its window."""
        if cut is None and whole is not None:
            return whole

        def run(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
            window = self.geometry.windows[layer]
            chosen = cut if window is not None and window < longest else whole
            if chosen is not None:
                chosen(layer, q, k, v, out)

        return run


class Merge:
    """Partial results of a batch's tokens, by level; a token has at most one part in each.

    Tokens stand in the order of the spans' sorted rows, with the query heads that share a key-value head side
    by side: [kv_heads, tokens * groups, head_dim].
    """

    def __init__(self, geometry: Geometry, levels: int, tokens: int, dtype: torch.dtype) -> None:
        self.geometry = geometry
        rows = tokens * geometry.gqa_group_size
        # Cells that no part fills keep the weight exp(-inf) and must stay finite.
        self.outs = torch.zeros(levels, geometry.kv_heads, rows, geometry.head_dim, dtype=dtype)
        self.sums = torch.full((levels, geometry.kv_heads, rows), -torch.inf)

    def put(
        self, level: int, first: int, last: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """StepAttention tokens first..last-1 of q [kv_heads, tokens * groups, d] to all of keys [m, kv_heads, d]."""
        rows = slice(first * self.geometry.gqa_group_size, last * self.geometry.gqa_group_size)
        out, sums = flash(
            q[:, rows][None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], 0.0, False
        )
        self.outs[level, :, rows] = out[0]
        self.sums[level, :, rows] = sums[0]

    def by_token(self, level: int) -> tuple[torch.Tensor, torch.Tensor]:
        """View a level as out [tokens, kv_heads, groups, d] and sums [tokens, kv_heads, groups]."""
        kv_heads, groups, size = self.geometry.kv_heads, self.geometry.gqa_group_size, self.geometry.head_dim
        out = self.outs[level].view(kv_heads, -1, groups, size).transpose(0, 1)
        return out, self.sums[level].view(kv_heads, -1, groups).transpose(0, 1)

    def result(self) -> torch.Tensor:
        """Weigh the parts by their share of the softmax's sum; return [tokens, heads, d]."""
        weights = self.sums.softmax(dim=0).to(self.outs.dtype)
        merged = torch.einsum("lhr,lhrd->hrd", weights, self.outs)
        kv_heads, groups, size = self.geometry.kv_heads, self.geometry.gqa_group_size, self.geometry.head_dim
        return merged.view(kv_heads, -1, groups, size).transpose(0, 1).reshape(-1, kv_heads * groups, size)


def by_kv_head(q: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Return q [tokens, heads, d] as [kv_heads, tokens * groups, d]."""
    shape = (len(q), geometry.kv_heads, geometry.gqa_group_size, geometry.head_dim)
    return q.reshape(shape).transpose(0, 1).reshape(geometry.kv_heads, -1, geometry.head_dim)


class CpuDecode:
    """A batch of decodes: spans in place, and all that is left over gathered into one padded tensor."""

    def __init__(self, geometry: Geometry, kv: PagedKV, rows: DecodeRows) -> None:
        self.geometry = geometry
        self.kv = kv
        lengths = rows.lengths.astype(np.int64)
        self.spans: Spans = find_shared_spans(rows.pages.host, rows.slots, lengths, kv.page_size, keep_last=True)
        count, width = len(rows.slots), max(len(cells) for cells in self.spans.rest)
        cells = np.zeros((count, width), np.int64)
        mask = np.full((count, 1, 1, width), -np.inf, np.float32)
        for row, rest in enumerate(self.spans.rest):
            cells[row, : len(rest)] = rest
            mask[row, ..., : len(rest)] = 0
        self.cells = torch.from_numpy(cells.ravel())
        self.mask = torch.from_numpy(mask).to(kv.keys.dtype)
        self.order = torch.from_numpy(self.spans.order)
        self.merge = Merge(geometry, self.spans.levels, count, kv.keys.dtype)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """StepAttention q [rows, heads, d] into `out`."""
        keys, values, geometry = self.kv.keys[layer], self.kv.values[layer], self.geometry
        q = q[self.order]
        shape = (len(q), -1, geometry.kv_heads, geometry.head_dim)
        rest, sums = flash(
            q.view(len(q), geometry.kv_heads, geometry.gqa_group_size, geometry.head_dim),
            keys.index_select(0, self.cells).view(shape).transpose(1, 2),
            values.index_select(0, self.cells).view(shape).transpose(1, 2),
            0.0,
            False,
            attn_mask=self.mask,
        )
        if not self.spans.spans:
            out[self.order] = rest.reshape(out.shape)
            return
        merged, merged_sums = self.merge.by_token(0)
        merged.copy_(rest)
        merged_sums.copy_(sums)
        q = by_kv_head(q, geometry)
        for span in self.spans.spans:
            here = slice(span.start, span.start + span.count)
            self.merge.put(span.level, span.first, span.last, q, keys[here], values[here])
        out[self.order] = self.merge.result()


class CpuPrefill:
    """Prefill chunks: each causally on its own tokens, and in full on what its slot holds already."""

    def __init__(self, geometry: Geometry, kv: PagedKV, chunks: tuple[QueryChunk, ...], pages: PageTable) -> None:
        self.geometry = geometry
        self.kv = kv
        slots = np.array([chunk.slot for chunk in chunks], np.int64)
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        counts = np.array([chunk.count for chunk in chunks], np.int64)
        self.spans: Spans = find_shared_spans(pages.host, slots, starts, kv.page_size, keep_last=False)
        order = self.spans.order
        begins = np.cumsum(counts) - counts
        self.own = [slice(int(begins[row]), int(begins[row] + counts[row])) for row in order]
        """By sorted row: its tokens in the batch."""
        self.edges = np.concatenate([[0], np.cumsum(counts[order])]).tolist()
        """By sorted row: its first token among the sorted; then their number."""
        self.tokens = torch.from_numpy(np.concatenate([np.arange(s.start, s.stop) for s in self.own]))
        self.rest = [(row, torch.from_numpy(c)) for row, c in enumerate(self.spans.rest) if len(c)]
        self.levels = self.spans.levels + bool(self.rest)
        if self.levels > 1:
            self.merge = Merge(geometry, self.levels, int(counts.sum()), kv.keys.dtype)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """StepAttention q [tokens, heads, d] into `out`; k and v [tokens, kv_heads, d] are the chunks' own."""
        kv_heads = self.geometry.kv_heads
        if self.levels == 1:
            for here in self.own:
                grouped(out[here], kv_heads).copy_(self.causal(q[here], k[here], v[here])[0])
            return
        merged, merged_sums = self.merge.by_token(0)
        for row, here in enumerate(self.own):
            there = slice(self.edges[row], self.edges[row + 1])
            own, sums = self.causal(q[here], k[here], v[here])
            merged[there] = own.permute(2, 1, 0, 3)
            merged_sums[there] = sums.permute(2, 1, 0)
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        q = by_kv_head(q[self.tokens], self.geometry)
        for span in self.spans.spans:
            here = slice(span.start, span.start + span.count)
            first, last = self.edges[span.first], self.edges[span.last]
            self.merge.put(span.level, first, last, q, keys[here], values[here])
        for row, cells in self.rest:
            first, last = self.edges[row], self.edges[row + 1]
            self.merge.put(self.levels - 1, first, last, q, keys[cells], values[cells])
        out[self.tokens] = self.merge.result()

    def causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """StepAttention one chunk to itself: out [groups, kv_heads, n, d] and sums [groups, kv_heads, n]."""
        queries = grouped(q, self.geometry.kv_heads)
        shape = (len(queries), k.shape[1], len(k), k.shape[2])
        return flash(queries, k.transpose(0, 1).expand(shape), v.transpose(0, 1).expand(shape), 0.0, True)
