# SPDX-License-Identifier: Apache-2.0
"""Reference backend in plain PyTorch for any device; other backends are tested against it."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from mizzen.attention.base import (
    AttentionBackend,
    DecodeRows,
    Geometry,
    PagedKV,
    PageTable,
    PlannedAttention,
    QueryChunk,
)

MAX_TOKENS_AT_ONCE = 1 << 18
"""Maximum number of tokens, including padding, whose KV is gathered at once; bounds temporary memory."""


def kv_slots_of(pages: torch.Tensor, tokens: int, page_size: int) -> torch.Tensor:
    """Return the KV slots, int64 [rows, tokens], of positions 0..tokens-1; `pages` is [rows, columns]."""
    columns = -(-tokens // page_size)
    offsets = torch.arange(page_size, device=pages.device)
    return (pages[:, :columns, None].long() * page_size + offsets).flatten(1)[:, :tokens]


def group_queries(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """View q [tokens, heads, d] as [group size, kv_heads, tokens, d]; heads along dim 0 share a KV head."""
    tokens, heads, size = q.shape
    return q.view(tokens, kv_heads, heads // kv_heads, size).permute(2, 1, 0, 3)


def scaled_attention(
    geometry: Geometry,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of q [..., n, d] to k and v [..., m, d] with the model's scale and softcap.

    `mask` is bool and broadcasts to [..., n, m]; without a mask, attention is causal, and n must equal m.
    `sinks` are the scores of the attention sinks, and broadcast to [..., n].
    """
    if geometry.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=geometry.score_scale
        )
    if mask is None:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(geometry.score_scale)
    if geometry.softcap is not None:
        scores = scores.div_(geometry.softcap).tanh_().mul_(geometry.softcap)
    scores = scores.masked_fill_(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(scores.shape[:-1])[..., None]), dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : k.shape[-2]]
    return torch.matmul(weights.to(v.dtype), v)


def attend_chunk(
    geometry: Geometry,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute the attention of q [n, heads, d] to k and v [m, kv_heads, d]; write it to `out` [n, heads, d].

    `mask` is bool [n, m]; without a mask, attention is causal, and n must equal m. `sinks` [heads] are the
    scores of the attention sinks. Keys and values are not
    copied for each query head: `expand` broadcasts them over the query heads that share them.
    """
    queries = group_queries(q, k.shape[1])
    shape = (len(queries), k.shape[1], len(k), k.shape[2])
    keys, values = k.transpose(0, 1).expand(shape), v.transpose(0, 1).expand(shape)
    if sinks is not None:
        sinks = sinks.view(k.shape[1], -1).t()[..., None]
    result = scaled_attention(geometry, queries, keys, values, mask, sinks)
    group_queries(out, k.shape[1]).copy_(result)


def chunk_mask(chunk: QueryChunk, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return the mask of a chunk's queries, bool [count, end]; None if plain causal attention is enough."""
    if chunk.start == 0 and (window is None or chunk.end <= window):
        return None
    queries = torch.arange(chunk.start, chunk.end, device=device)[:, None]
    keys = torch.arange(chunk.end, device=device)
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)


class ReferenceAttention(AttentionBackend):
    """Reference backend: gathers pages into padded tensors and calls scaled_dot_product_attention."""

    def plan_decode(self, rows: DecodeRows) -> PlannedAttention:
        """Plan a batch of decodes in parts, so that temporary memory is bounded."""
        longest = int(rows.lengths.max())
        step = max(1, MAX_TOKENS_AT_ONCE // longest)
        parts = [
            ReferenceDecodeRows(self.geometry, self.kv, rows, slice(first, first + step))
            for first in range(0, len(rows.slots), step)
        ]

        def run(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
            for part in parts:
                part.run(layer, q, out)

        return run

    def plan_prefill(self, chunks: tuple[QueryChunk, ...], pages: PageTable) -> PlannedAttention:
        """Plan prefill chunks, which run one after another."""
        device = pages.device.device
        windows = set(self.geometry.windows)
        plans = []
        for chunk in chunks:
            kv_slots = kv_slots_of(pages.device[chunk.slot][None], chunk.end, self.kv.page_size)[0]
            plans.append((chunk.count, kv_slots, {w: chunk_mask(chunk, w, device) for w in windows}))

        def run(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
            first = 0
            for count, kv_slots, masks in plans:
                mask = masks[self.geometry.windows[layer]]
                rows = slice(first, first + count)
                keys, values = self.kv.read(layer, kv_slots, q.dtype)
                sinks = self.kv.layer_sinks(layer)
                attend_chunk(self.geometry, q[rows], keys, values, out[rows], mask=mask, sinks=sinks)
                first += count

        return run


class ReferenceDecodeRows:
    """Planned attention of some rows of a decode batch, padded to the longest of these rows."""

    def __init__(self, geometry: Geometry, kv: PagedKV, rows: DecodeRows, part: slice) -> None:
        self.geometry = geometry
        self.kv = kv
        self.part = part
        device = rows.pages.device.device
        slots = torch.from_numpy(np.ascontiguousarray(rows.slots[part])).to(device, non_blocking=True)
        lengths = torch.from_numpy(np.ascontiguousarray(rows.lengths[part])).to(device, non_blocking=True)
        longest = int(rows.lengths[part].max())
        self.kv_slots = kv_slots_of(rows.pages.device[slots], longest, kv.page_size)
        positions = torch.arange(longest, device=device)
        self.masks: dict[int | None, torch.Tensor] = {}
        for window in set(geometry.windows):
            mask = positions < lengths[:, None]
            if window is not None:
                mask &= positions >= lengths[:, None] - window
            self.masks[window] = mask[:, None, None]

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Compute the attention of these rows of q [rows, heads, d]; write it to the same rows of `out`."""
        shape = (-1, self.geometry.kv_heads, self.geometry.gqa_group_size, self.geometry.head_dim)
        keys, values = self.kv.read(layer, self.kv_slots, q.dtype)
        sinks = self.kv.layer_sinks(layer)
        result = scaled_attention(
            self.geometry,
            q[self.part].view(shape),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            self.masks[self.geometry.windows[layer]],
            None if sinks is None else sinks.view(shape[1:3]),
        )
        out[self.part].view(shape).copy_(result)
