"""Attention in plain PyTorch on any device: the oracle that other backends are compared with."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from mizzen.attention.base import AttentionBackend, QueryChunk, DecodeRows, Geometry, PagedKV, PageTable, PlannedAttention

MAX_GATHERED = 1 << 18
"""Tokens (padding included) whose KV is gathered at once, which bounds temporary memory."""


def cells_of(pages: torch.Tensor, tokens: int, page_size: int) -> torch.Tensor:
    """Return where positions 0..tokens-1 lie, int64 [rows, tokens], for pages [rows, columns]."""
    columns = -(-tokens // page_size)
    offsets = torch.arange(page_size, device=pages.device)
    return (pages[:, :columns, None].long() * page_size + offsets).flatten(1)[:, :tokens]


def grouped(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """View q [tokens, heads, d] as [groups, kv_heads, tokens, d]: queries that share keys lie along dim 0."""
    tokens, heads, size = q.shape
    return q.view(tokens, kv_heads, heads // kv_heads, size).permute(2, 1, 0, 3)


def attend_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """StepAttention q [n, heads, d] to k, v [m, kv_heads, d] into `out`; no mask means causal with n = m.

    Keys are broadcast over the query heads that share them, by strides.
    """
    queries = grouped(q, k.shape[1])
    shape = (len(queries), k.shape[1], len(k), k.shape[2])
    result = F.scaled_dot_product_attention(
        queries,
        k.transpose(0, 1).expand(shape),
        v.transpose(0, 1).expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
    )
    grouped(out, k.shape[1]).copy_(result)


def chunk_mask(chunk: QueryChunk, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return what a chunk's queries may see, bool [count, end]; None when that is plainly causal."""
    if chunk.start == 0 and (window is None or chunk.end <= window):
        return None
    queries = torch.arange(chunk.start, chunk.end, device=device)[:, None]
    keys = torch.arange(chunk.end, device=device)
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)


class ReferenceAttention(AttentionBackend):
    """Gathers pages into padded tensors and lets scaled_dot_product_attention do the rest."""

    def plan_decode(self, rows: DecodeRows) -> PlannedAttention:
        """Prepare a batch of decodes, in parts of bounded temporary memory."""
        longest = int(rows.lengths.max())
        step = max(1, MAX_GATHERED // longest)
        parts = [
            ReferenceDecodeRows(self.geometry, self.kv, rows, slice(first, first + step))
            for first in range(0, len(rows.slots), step)
        ]

        def run(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
            for part in parts:
                part.run(layer, q, out)

        return run

    def plan_prefill(self, chunks: tuple[QueryChunk, ...], pages: PageTable) -> PlannedAttention:
        """Prepare prefill chunks, one after the other."""
        device = pages.device.device
        windows = set(self.geometry.windows)
        plans = []
        for chunk in chunks:
            cells = cells_of(pages.device[chunk.slot][None], chunk.end, self.kv.page_size)[0]
            plans.append((chunk.count, cells, {w: chunk_mask(chunk, w, device) for w in windows}))

        def run(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
            first = 0
            for count, cells, masks in plans:
                mask = masks[self.geometry.windows[layer]]
                here = slice(first, first + count)
                attend_chunk(q[here], *self.kv.read(layer, cells, q.dtype), out[here], mask)
                first += count

        return run


class ReferenceDecodeRows:
    """Some rows of a batch of decodes, padded to the longest of them."""

    def __init__(self, geometry: Geometry, kv: PagedKV, rows: DecodeRows, part: slice) -> None:
        self.geometry = geometry
        self.kv = kv
        self.part = part
        device = rows.pages.device.device
        slots = torch.from_numpy(np.ascontiguousarray(rows.slots[part])).to(device, non_blocking=True)
        lengths = torch.from_numpy(np.ascontiguousarray(rows.lengths[part])).to(device, non_blocking=True)
        longest = int(rows.lengths[part].max())
        self.cells = cells_of(rows.pages.device[slots], longest, kv.page_size)
        positions = torch.arange(longest, device=device)
        self.masks: dict[int | None, torch.Tensor] = {}
        for window in set(geometry.windows):
            mask = positions < lengths[:, None]
            if window is not None:
                mask &= positions >= lengths[:, None] - window
            self.masks[window] = mask[:, None, None]

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """StepAttention the part's rows of q [rows, heads, d] into those of `out`."""
        shape = (-1, self.geometry.kv_heads, self.geometry.gqa_group_size, self.geometry.head_dim)
        keys, values = self.kv.read(layer, self.cells, q.dtype)
        result = F.scaled_dot_product_attention(
            q[self.part].view(shape),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=self.masks[self.geometry.windows[layer]],
        )
        out[self.part].view(shape).copy_(result)
