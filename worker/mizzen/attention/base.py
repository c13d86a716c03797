"""The interface of attention backends, and the paged KV that they read.

A step's tokens come as one batch: first one token of each decode row, then the tokens of each prefill chunk.
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
"""The largest number of torch.float8_e4m3fn."""

PlannedAttention = Callable[[int, torch.Tensor, Any, Any, torch.Tensor], None]
"""(layer, q, k, v, out): attention of one part of the batch, written to `out`; k and v are stored already.

k and v are the part's own new ones, [tokens, kv_heads, d], or None where a fused kernel stored them: backends
that run on a GPU read them from the cache.
"""


FusedDecode = Callable[
    [
        int,
        torch.Tensor,
        tuple[torch.Tensor, torch.Tensor] | None,
        float,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
    ],
    None,
]
"""(layer, qkv, norms, epsilon, cos, sin, out): attention of decodes from their raw projection.

It does to queries and keys what the model does between projection and attention (norms [d] of queries and
keys or None, rotation by cos and sin [rows, 1, d / 2]), and stores keys and values.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The shape of a model's attention on one rank."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """By layer: tokens that a token sees, itself included; None sees all."""

    @property
    def gqa_group_size(self) -> int:
        """Query heads that share a key-value head."""
        return self.heads // self.kv_heads


class KVFormat(Protocol):
    """What of a KV cache decides which backends run over it."""

    @property
    def device(self) -> torch.device:
        """Where it is."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Precision of keys and values."""
        ...

    @property
    def quantized(self) -> bool:
        """Whether keys and values are 8-bit floats."""
        ...


@dataclass(frozen=True, slots=True)
class KVSpec:
    """A cache that is not allocated yet."""

    device: torch.device
    dtype: torch.dtype

    @property
    def quantized(self) -> bool:
        """Whether keys and values are 8-bit floats."""
        return self.dtype == torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """Keys and values of all layers, [layers, pages * page_size, kv_heads, head_dim] each.

    Finite everywhere from the start: masked slot_mapping are multiplied by zero, which a NaN would survive.
    """

    keys: torch.Tensor
    values: torch.Tensor
    page_size: int
    key_scales: tuple[float, ...] = ()
    """By layer: what queries come multiplied by, because keys come divided by it; none where all are 1."""

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.keys.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of keys and values."""
        return self.keys.dtype

    @property
    def quantized(self) -> bool:
        """Whether keys and values are 8-bit floats (e4m3, stored as they come: the weights have scales)."""
        return self.keys.dtype == torch.float8_e4m3fn

    def store(self, layer: int, slot_mapping: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k, v [tokens, kv_heads, head_dim] to `slot_mapping` (int64 [tokens]: page * page_size + offset)."""
        keys, values = self.keys[layer], self.values[layer]
        if self.quantized:
            # The format has no infinity: what is beyond its largest number becomes that.
            k, v = (x.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(keys.dtype).view(torch.uint8) for x in (k, v))
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        keys.index_copy_(0, slot_mapping, k)
        values.index_copy_(0, slot_mapping, v)

    def read(self, layer: int, slot_mapping: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the keys and values of `slot_mapping` (int64, any shape) as `dtype`."""
        keys, values = self.keys[layer], self.values[layer]
        if self.quantized:
            return tuple(x.view(torch.uint8)[slot_mapping].view(x.dtype).to(dtype) for x in (keys, values))  # type: ignore[return-value]
        return keys[slot_mapping], values[slot_mapping]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """The page table, int32 [slots, columns], as the host and the device know it (the same memory on cpu)."""

    host: Int32
    device: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """One query token for each of these slots."""

    slots: Int64
    """[rows], row of the page table."""
    lengths: Int32
    """[rows], tokens whose KV is read, the query's own included."""
    pages: PageTable


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryChunk:
    """`count` query tokens of a slot at positions start..start+count-1."""

    slot: int
    start: int
    count: int

    @property
    def end(self) -> int:
        """Tokens whose KV the last query token reads."""
        return self.start + self.count


def unsupported_error(name: str, why: str) -> ValueError:
    """Return the error of a backend, named as the user did, that was chosen and does not run here."""
    return ValueError(f"{name} does not run here: {why}; choose reference or auto")


def copy_to_device(array: Int32, device: torch.device) -> torch.Tensor:
    """Copy a small array to the device without waiting."""
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(device, non_blocking=True)


class AttentionBackend(ABC):
    """Computes attention over paged KV; one instance an engine, used from one thread.

    Attention is planned once a step and run once a layer.
    """

    def __init__(self, geometry: Geometry, kv: PagedKV) -> None:
        self.geometry = geometry
        self.kv = kv

    def kernel_specs(self, *, norm: bool) -> set[KernelSpec]:
        """Return what a start had better compile ahead; `norm` is whether queries and keys have one."""
        return set()

    @abstractmethod
    def plan_decode(self, rows: DecodeRows) -> PlannedAttention:
        """Prepare a batch of decodes."""

    @abstractmethod
    def plan_prefill(self, chunks: tuple[QueryChunk, ...], pages: PageTable) -> PlannedAttention:
        """Prepare prefill chunks; their tokens stand one chunk after the other."""


@runtime_checkable
class DevicePlannedDecode(Protocol):
    """A backend that plans decodes without the host knowing their lengths, as captured graphs need it."""

    def plan_decode_on_device(self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> PlannedAttention:
        """Prepare a batch of decodes: int32 [rows], int32 [rows], int32 [slots, columns]."""
        ...


@runtime_checkable
class DevicePlannedSequences(Protocol):
    """A backend that plans sequences of any lengths without the host knowing these, as graphs need it."""

    def plan_on_device(
        self,
        starts: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
        longest: int,
    ) -> PlannedAttention:
        """Prepare a batch of query sequences, the last tokens of their slots each.

        Args:
            starts: int32 [sequences + 1], where each begins in the batch, then where the last one ends.
            slots: int32 [sequences], rows of the page table.
            lengths: int32 [sequences], tokens whose KV the last query of each reads, at least 1. Queries
                beyond the length, at the front of a sequence, see nothing and yield zeros.
            table: int32 [slots, columns].
            longest: No sequence has more queries.
        """
        ...


@runtime_checkable
class HostPlannedDecode(Protocol):
    """A `DevicePlannedDecode` whose captured batches the host has to plan anew before each replay."""

    def refresh(self, rows: int, lengths: Int32) -> None:
        """Plan a captured batch of `rows` for lengths (int32 [at most rows]; rows of padding have 1)."""
        ...


@runtime_checkable
class LengthSplitDecode(Protocol):
    """A `DevicePlannedDecode` that can cut contexts by lengths that only the device knows, where that pays."""

    @property
    def concurrent_splits(self) -> int:
        """Parts of contexts that run at once, by which it cuts; 0 where it cannot cut by lengths."""
        ...

    def length_splits_are_faster(self, rows: int, lengths: Int32) -> bool:
        """Tell whether it pays for a batch padded to `rows`, of so many tokens (int32 [at most rows])."""
        ...

    def plan_length_splits_on_device(self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> PlannedAttention:
        """Prepare a batch as `plan_decode_on_device` does, cut by its lengths."""
        ...


@runtime_checkable
class FusedQKVDecode(Protocol):
    """A planned batch of decodes (a `Run` too) that can begin at the raw projection."""

    def fuse_qkv_prep(self, slot_mapping: torch.Tensor) -> FusedDecode:
        """Return that, for new keys and values that go to `slot_mapping` (int64 [rows])."""
        ...


class StepAttention:
    """Attention of one step's mixed batch, layer by layer."""

    def __init__(
        self, kv: PagedKV, slot_mapping: torch.Tensor, count: int, decode: PlannedAttention | None, prefill: PlannedAttention | None
    ) -> None:
        self.kv = kv
        self.slot_mapping = slot_mapping
        """int64 [tokens], where the tokens' KV goes."""
        self.count = count
        """Tokens that are decodes: the first ones."""
        self.decode = decode
        self.prefill = prefill
        self.fused_decode: FusedDecode | None = None
        """Attends from the raw projection, where the whole batch can."""
        if prefill is None and isinstance(decode, FusedQKVDecode):
            self.fused_decode = decode.fuse_qkv_prep(slot_mapping)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k, v [tokens, kv_heads, d] and attend q [tokens, heads, d] → [tokens, heads, d]."""
        self.kv.store(layer, self.slot_mapping, k, v)
        out, count = torch.empty(q.shape, dtype=q.dtype, device=q.device), self.count
        if self.decode is not None:
            self.decode(layer, q[:count], k[:count], v[:count], out[:count])
        if self.prefill is not None:
            self.prefill(layer, q[count:], k[count:], v[count:], out[count:])
        return out

    def attend_cached(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """StepAttention q [tokens, heads, d], whose keys and values are in the cache already; on a GPU alone."""
        out, count = torch.empty(q.shape, dtype=q.dtype, device=q.device), self.count
        if self.decode is not None:
            self.decode(layer, q[:count], None, None, out[:count])
        if self.prefill is not None:
            self.prefill(layer, q[count:], None, None, out[count:])
        return out


class MixedAttention:
    """Attention of a mixed batch: stores new KV, then runs decodes and prefill chunks."""

    def __init__(
        self,
        kv: PagedKV,
        decode: AttentionBackend,
        prefill: AttentionBackend,
        backend_names: tuple[str, str] = ("", ""),
    ) -> None:
        self.kv = kv
        self.backend_names = backend_names
        """Of the backends of decodes and of prompts, as options call them."""
        self.decode = decode
        self.prefill = prefill

    def plan(self, slot_mapping: torch.Tensor, rows: DecodeRows, chunks: tuple[QueryChunk, ...]) -> StepAttention:
        """Prepare a step; `slot_mapping` (int64 [tokens]) is where its tokens' KV goes."""
        count = len(rows.slots)
        decode = self.decode.plan_decode(rows) if count else None
        prefill = self.prefill.plan_prefill(chunks, rows.pages) if chunks else None
        return StepAttention(self.kv, slot_mapping, count, decode, prefill)
