# SPDX-License-Identifier: Apache-2.0
"""Interface of attention backends, and the paged KV cache that they read.

The tokens of a step form one batch: one token per decode row, followed by the tokens of each prefill chunk.
Prefill and decode may use different backends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch

from mizzen.core.request import Int32, Int64

if TYPE_CHECKING:
    from mizzen.kernels.nvrtc import KernelSpec

E4M3_LARGEST = 448.0
"""Largest finite value of torch.float8_e4m3fn."""

PlannedAttention = Callable[[int, torch.Tensor, Any, Any, torch.Tensor], None]
"""Function (layer, q, k, v, out) that computes attention for the decodes or the prefill chunks of a batch.

It reads q [tokens, heads, d] and writes `out` of the same shape. k and v [tokens, kv_heads, d] are the keys
and values of the same tokens, and are also in the cache already. Both may be None on GPUs, where all backends
can read them from the cache; see `BatchKVAttention`.
"""
QKNorms = tuple[torch.Tensor, torch.Tensor] | None
"""RMSNorm weights [d] of queries and keys; None for a model without QK norm."""
FusedDecode = Callable[[int, torch.Tensor, QKNorms, float, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Function (layer, qkv, norms, epsilon, cos, sin, out) that computes the attention of decodes from raw QKV.

Raw QKV is the output of the QKV projection. The function applies QK norm and RoPE (cos and sin
[rows, 1, d / 2]) to queries and keys, stores keys and values, and writes `out` [rows, heads, d].
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Head counts, head dim and sliding windows of a model's attention on one rank."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Window of each layer: number of tokens that a token attends to, including itself; None if unlimited."""
    scale: float | None = None
    """Factor of the query-key products; None for 1 / sqrt(head_dim)."""
    softcap: float | None = None
    """Bound c of the scaled products s, which become c * tanh(s / c); None for none."""
    has_sinks: bool = False
    """Whether each head has an attention sink (`PagedKV.sinks`)."""

    @property
    def score_scale(self) -> float:
        """Factor of the query-key products."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def gqa_group_size(self) -> int:
        """Number of query heads that share a KV head."""
        return self.heads // self.kv_heads


class KVFormat(Protocol):
    """Properties of a KV cache that decide which backends support it."""

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Data type of keys and values."""
        ...

    @property
    def quantized(self) -> bool:
        """Whether keys and values are 8-bit floats."""
        ...


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Format of a KV cache that is not allocated yet."""

    device: torch.device
    dtype: torch.dtype

    @property
    def quantized(self) -> bool:
        """Whether keys and values are 8-bit floats."""
        return self.dtype == torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """Paged KV cache: keys and values of all layers, each [layers, pages * page_size, kv_heads, head_dim].

    A KV slot is an index into the second dimension: page * page_size + offset. All entries must be finite
    from the start, because masked KV slots are multiplied by zero, which does not cancel a NaN.
    """

    keys: torch.Tensor
    values: torch.Tensor
    page_size: int
    key_scales: tuple[float, ...] = ()
    """Scale of each layer: its cached keys are divided by it, and its queries are multiplied by it. Empty if
    all scales are 1."""
    sinks: torch.Tensor | None = None
    """Attention sinks [layers, heads] in the model's dtype; None for a model without.

    A sink (arXiv 2309.17453, as gpt-oss uses it) is the learned score of a key that every query sees, and
    whose value is zero: it takes its share of the softmax, so that the weights of the tokens add up to less
    than 1.
    """

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self.keys.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of keys and values."""
        return self.keys.dtype

    @property
    def quantized(self) -> bool:
        """Whether keys and values are 8-bit floats (e4m3); their scales are folded into the weights."""
        return self.keys.dtype == torch.float8_e4m3fn

    def layer_sinks(self, layer: int) -> torch.Tensor | None:
        """Return the attention sinks [heads] of a layer; None for a model without."""
        return None if self.sinks is None else self.sinks[layer]

    def store(self, layer: int, slot_mapping: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k, v [tokens, kv_heads, head_dim] to the KV slots `slot_mapping` (int64 [tokens])."""
        keys, values = self.keys[layer], self.values[layer]
        if self.quantized:
            # The format has no infinity: saturate at its largest value.
            k, v = (x.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(keys.dtype).view(torch.uint8) for x in (k, v))
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        keys.index_copy_(0, slot_mapping, k)
        values.index_copy_(0, slot_mapping, v)

    def read(
        self, layer: int, kv_slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the keys and values of KV slots (int64), each [*slots, kv_heads, head_dim].

        8-bit keys and values are cast to `dtype`; others keep the dtype of the cache.
        """
        keys, values = self.keys[layer], self.values[layer]
        if self.quantized:
            return tuple(x.view(torch.uint8)[kv_slots].view(x.dtype).to(dtype) for x in (keys, values))  # type: ignore[return-value]
        return keys[kv_slots], values[kv_slots]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """Page table, int32 [slots, columns], as a host array and a device tensor; on the CPU, both are equal."""

    host: Int32
    device: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """Rows of a decode batch, with one query token each."""

    slots: Int64
    """Row of the page table for each decode row, [rows]."""
    lengths: Int32
    """Number of tokens whose KV each row reads, including the query token itself, [rows]."""
    pages: PageTable


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryChunk:
    """A prefill chunk: `count` query tokens of a slot at positions start..start+count-1."""

    slot: int
    start: int
    count: int

    @property
    def end(self) -> int:
        """Number of tokens whose KV the last query token reads."""
        return self.start + self.count


def copy_to_device(values: Int32 | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small array or a tensor of the host to a device, without waiting for a GPU."""
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class AttentionBackend(ABC):
    """Computes attention over paged KV; one instance per engine, used from one thread.

    Attention is planned once per step and run once per layer.
    """

    def __init__(self, geometry: Geometry, kv: PagedKV) -> None:
        self.geometry = geometry
        self.kv = kv

    def kernel_specs(self, *, norm: bool) -> set[KernelSpec]:
        """Return the specs of kernels to compile at start-up; `norm` is whether the model has QK norm."""
        return set()

    @abstractmethod
    def plan_decode(self, rows: DecodeRows) -> PlannedAttention:
        """Plan attention for a batch of decodes."""

    @abstractmethod
    def plan_prefill(self, chunks: tuple[QueryChunk, ...], pages: PageTable) -> PlannedAttention:
        """Plan attention for prefill chunks, whose tokens are concatenated in the order of `chunks`."""


@runtime_checkable
class DevicePlannedDecode(Protocol):
    """A backend that can plan decodes from lengths in device memory, as captured graphs require."""

    def plan_decode_on_device(
        self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> PlannedAttention:
        """Plan decodes from slots and lengths (int32 [rows]) and the page table (int32 [slots, columns])."""
        ...


@runtime_checkable
class DevicePlannedSequences(Protocol):
    """A backend that can plan sequences from lengths in device memory, as captured graphs require."""

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
        """Plan a batch of query sequences; each sequence consists of the last tokens of a slot.

        Args:
            starts: Index of the first query of each sequence, and the end of the last sequence, int32
                [sequences + 1].
            slots: Row of the page table for each sequence, int32 [sequences].
            lengths: Number of tokens whose KV the last query of each sequence reads, at least 1, int32
                [sequences]. If a sequence has more queries than this number, the first ones attend to
                nothing and yield zeros.
            table: Page table, int32 [slots, columns].
            longest: Maximum number of queries in a sequence.
            split: Whether contexts may be split among thread blocks, whose results are then combined. This
                makes attention of few queries to a long context faster. It costs time in proportion to the
                number of sequences times `longest`, even if all sequences are short.
        """
        ...


@runtime_checkable
class HostPlannedDecode(Protocol):
    """A `DevicePlannedDecode` whose captured batches the host must plan again before each replay."""

    def refresh(self, rows: int, lengths: Int32) -> None:
        """Plan a captured batch of `rows` rows for new lengths, int32 [at most rows].

        If there are fewer lengths than rows, the last rows are padding and get the length 1.
        """
        ...


@runtime_checkable
class LengthSplitDecode(Protocol):
    """A `DevicePlannedDecode` that can also plan length-aware splits from lengths in device memory."""

    @property
    def concurrent_splits(self) -> int:
        """Number of splits that run at once; 0 if length-aware splits are not supported."""
        ...

    def length_splits_are_faster(self, rows: int, lengths: Int32) -> bool:
        """Return whether length-aware splits are faster than equal ones for a batch padded to `rows` rows.

        `lengths` (int32 [at most rows]) holds the number of tokens whose KV each row reads; it has no entries
        for padding rows.
        """
        ...

    def plan_length_splits_on_device(
        self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> PlannedAttention:
        """Plan decodes with length-aware splits; the arguments are the same as in `plan_decode_on_device`.

        `slots` and `lengths` are int32 [rows]; `table` is the page table, int32 [slots, columns].
        """
        ...


@runtime_checkable
class FusedQKVDecode(Protocol):
    """A `PlannedAttention` for decodes that can also compute attention from the raw QKV projection."""

    def fuse_qkv_prep(self, slot_mapping: torch.Tensor) -> FusedDecode:
        """Return a fused decode that stores new keys and values in KV slots `slot_mapping` (int64 [rows])."""
        ...


@runtime_checkable
class BatchKVAttention(Protocol):
    """A `PlannedAttention` of chunks that is faster if it gets the keys and values of the batch."""

    @property
    def reads_batch_kv(self) -> bool:
        """Whether a fused kernel should also write rotated keys back to the QKV projection."""
        ...


class StepAttention:
    """Planned attention of one step's mixed batch, called once per layer."""

    def __init__(
        self,
        kv: PagedKV,
        slot_mapping: torch.Tensor,
        decode_count: int,
        decode: PlannedAttention | None,
        prefill: PlannedAttention | None,
        live: torch.Tensor | None = None,
    ) -> None:
        self.kv = kv
        self.slot_mapping = slot_mapping
        """KV slots of the tokens, int64 [tokens]."""
        self.decode_count = decode_count
        """Number of decode tokens, which come first."""
        self.decode = decode
        self.prefill = prefill
        self.live = live
        """Tokens that are not padding, bool [tokens]; None if all are. Only captured graphs have padding."""
        self.fused_decode: FusedDecode | None = None
        """Decode attention from the raw QKV projection; None if the batch has prefill chunks, or if the
        decode backend does not support it."""
        if prefill is None and isinstance(decode, FusedQKVDecode):
            self.fused_decode = decode.fuse_qkv_prep(slot_mapping)
        self.reads_batch_kv = isinstance(prefill, BatchKVAttention) and prefill.reads_batch_kv
        """Whether chunks attend faster to keys and values of the batch."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v [tokens, kv_heads, d], and return the attention of q [tokens, heads, d]."""
        self.kv.store(layer, self.slot_mapping, k, v)
        return self.attend_cached(layer, q, k, v)

    def attend_cached(
        self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the attention of q [tokens, heads, d], whose KV is cached; k and v may be None on GPUs."""
        out, count = torch.empty(q.shape, dtype=q.dtype, device=q.device), self.decode_count
        for attend, rows in ((self.decode, slice(0, count)), (self.prefill, slice(count, None))):
            if attend is not None:
                new_kv = (None, None) if k is None or v is None else (k[rows], v[rows])
                attend(layer, q[rows], *new_kv, out[rows])
        return out


class MixedAttention:
    """Attention of an engine: plans mixed batches with one backend for decodes and one for prefill chunks."""

    def __init__(
        self,
        kv: PagedKV,
        decode: AttentionBackend,
        prefill: AttentionBackend,
        backend_names: tuple[str, str] = ("", ""),
    ) -> None:
        self.kv = kv
        self.backend_names = backend_names
        """Names of the decode backend and of the prefill backend, as in the options."""
        self.decode = decode
        self.prefill = prefill

    def plan(
        self, slot_mapping: torch.Tensor, rows: DecodeRows, chunks: tuple[QueryChunk, ...]
    ) -> StepAttention:
        """Plan a step; `slot_mapping` (int64 [tokens]) holds the KV slots of its tokens."""
        count = len(rows.slots)
        decode = self.decode.plan_decode(rows) if count else None
        prefill = self.prefill.plan_prefill(chunks, rows.pages) if chunks else None
        return StepAttention(self.kv, slot_mapping, count, decode, prefill)
