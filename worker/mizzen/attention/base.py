"""The interface of attention backends, and the paged KV cache that they read.

The tokens of a step form one batch: first one token per decode row, then the tokens of each prefill chunk.
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
"""Largest number of torch.float8_e4m3fn."""

PlannedAttention = Callable[[int, torch.Tensor, Any, Any, torch.Tensor], None]
"""(layer, q, k, v, out): computes attention for the decodes or prefills of a batch into `out`; k and v are
already cached.

k and v are the new ones of these tokens, [tokens, kv_heads, d], or None if a fused kernel cached them; GPU
backends read them from the cache.
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
"""(layer, qkv, norms, epsilon, cos, sin, out): fused QKV-prep decode, attention of decodes from the raw
projection.

It applies QK norm (norms: weights [d] of queries and keys, or None) and RoPE (cos and sin [rows, 1, d / 2])
to queries and keys, and stores keys and values.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Shape of a model's attention on one rank."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Sliding window by layer: tokens that a token attends to, itself included; None for all."""

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
    """Keys and values of all layers, each [layers, pages * page_size, kv_heads, head_dim].

    A KV slot is an index into the second dimension: page * page_size + offset. All values are finite from the
    start: masked KV slots are multiplied by zero, which a NaN would survive.
    """

    keys: torch.Tensor
    values: torch.Tensor
    page_size: int
    key_scales: tuple[float, ...] = ()
    """Factor of queries by layer, the divisor of the cached keys; empty if all are 1."""

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
        """Whether keys and values are 8-bit floats (e4m3, stored without scaling: the weights contain the
        scales)."""
        return self.keys.dtype == torch.float8_e4m3fn

    def store(self, layer: int, slot_mapping: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k, v [tokens, kv_heads, head_dim] to the KV slots `slot_mapping` (int64 [tokens])."""
        keys, values = self.keys[layer], self.values[layer]
        if self.quantized:
            # The format has no infinity: saturate at its largest number.
            k, v = (x.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(keys.dtype).view(torch.uint8) for x in (k, v))
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        keys.index_copy_(0, slot_mapping, k)
        values.index_copy_(0, slot_mapping, v)

    def read(
        self, layer: int, kv_slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the keys and values of KV slots (int64, any shape) as `dtype`."""
        keys, values = self.keys[layer], self.values[layer]
        if self.quantized:
            return tuple(x.view(torch.uint8)[kv_slots].view(x.dtype).to(dtype) for x in (keys, values))  # type: ignore[return-value]
        return keys[kv_slots], values[kv_slots]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """The page table, int32 [slots, columns], on the host and on the device (the same memory on the CPU)."""

    host: Int32
    device: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """Decode rows, with one query token each."""

    slots: Int64
    """Row of the page table by decode row, [rows]."""
    lengths: Int32
    """Tokens whose KV is read, the query's own included, [rows]."""
    pages: PageTable


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryChunk:
    """A prefill chunk: `count` query tokens of a slot at positions start..start+count-1."""

    slot: int
    start: int
    count: int

    @property
    def end(self) -> int:
        """Tokens whose KV the last query token reads."""
        return self.start + self.count


def unsupported_error(name: str, reason: str) -> ValueError:
    """Return the error for a backend that was chosen, under the name of the option, but is not supported."""
    return ValueError(f"{name} does not run here: {reason}; choose reference or auto")


def requires(
    kv: KVFormat,
    head_dim: int,
    *,
    min_capability: int | None = None,
    hopper: bool = False,
    dtypes: tuple[torch.dtype, ...],
    dtype_names: str,
    head_dims: tuple[int, ...] | None = None,
) -> str | None:
    """Return the first requirement of a backend that a KV cache does not meet, as a reason; None if it meets
    all.

    Args:
        kv: Format of the KV cache.
        head_dim: Head dim of the model.
        min_capability: Minimum major compute capability of the GPU.
        hopper: Whether the GPU must be a Hopper GPU.
        dtypes: Supported data types of the cache.
        dtype_names: Names of these types, for the reason.
        head_dims: Supported head dims; None if the caller checks them.
    """
    device = kv.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if min_capability is not None and capability[0] < min_capability:
        return f"it needs an NVIDIA GPU of compute capability {min_capability}.0 or above"
    if hopper and capability != (9, 0):
        return "it needs a Hopper GPU"
    if kv.dtype not in dtypes:
        return f"it needs {dtype_names}, not {str(kv.dtype).removeprefix('torch.')}"
    if head_dims is not None and head_dim not in head_dims:
        return f"head_dim must be one of {head_dims}, not {head_dim}"
    return None


def copy_to_device(array: Int32, device: torch.device) -> torch.Tensor:
    """Copy a small array to the device asynchronously."""
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(device, non_blocking=True)


class AttentionBackend(ABC):
    """Computes attention over paged KV; one instance per engine, used from one thread.

    Attention is planned once per step and run once per layer.
    """

    def __init__(self, geometry: Geometry, kv: PagedKV) -> None:
        self.geometry = geometry
        self.kv = kv

    def kernel_specs(self, *, norm: bool) -> set[KernelSpec]:
        """Return the specs of the kernels to compile at start-up; `norm` says whether the model has QK
        norm."""
        return set()

    @abstractmethod
    def plan_decode(self, rows: DecodeRows) -> PlannedAttention:
        """Plan a batch of decodes."""

    @abstractmethod
    def plan_prefill(self, chunks: tuple[QueryChunk, ...], pages: PageTable) -> PlannedAttention:
        """Plan prefill chunks, whose tokens are concatenated."""


@runtime_checkable
class DevicePlannedDecode(Protocol):
    """A backend that plans decodes whose lengths only the device knows, as captured graphs need it."""

    def plan_decode_on_device(
        self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> PlannedAttention:
        """Plan a batch of decodes: int32 [rows], int32 [rows], int32 [slots, columns]."""
        ...


@runtime_checkable
class DevicePlannedSequences(Protocol):
    """A backend that plans sequences of any lengths that only the device knows, as captured graphs need
    it."""

    def plan_on_device(
        self,
        starts: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
        longest: int,
    ) -> PlannedAttention:
        """Plan a batch of query sequences, each the last tokens of a slot.

        Args:
            starts: First token of each sequence in the batch, and the end of the last one, int32 [sequences +
                1].
            slots: Rows of the page table, int32 [sequences].
            lengths: Tokens whose KV the last query of each sequence reads, at least 1, int32 [sequences].
                Excess queries at the front of a sequence attend to nothing and yield zeros.
            table: Page table, int32 [slots, columns].
            longest: Maximum number of queries of a sequence.
        """
        ...


@runtime_checkable
class HostPlannedDecode(Protocol):
    """A `DevicePlannedDecode` whose captured batches the host must plan again before each replay."""

    def refresh(self, rows: int, lengths: Int32) -> None:
        """Plan a captured batch of `rows` for new lengths (int32 [at most rows]; padding rows have 1)."""
        ...


@runtime_checkable
class LengthSplitDecode(Protocol):
    """A `DevicePlannedDecode` with length-aware splits, planned from lengths that only the device knows."""

    @property
    def concurrent_splits(self) -> int:
        """Number of splits that run at once; 0 if length-aware splits are not supported."""
        ...

    def length_splits_are_faster(self, rows: int, lengths: Int32) -> bool:
        """Return whether length-aware splits are faster for a batch padded to `rows` with these lengths.

        `lengths` is int32 [at most rows].
        """
        ...

    def plan_length_splits_on_device(
        self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> PlannedAttention:
        """Plan a batch like `plan_decode_on_device`, with length-aware splits."""
        ...


@runtime_checkable
class FusedQKVDecode(Protocol):
    """A `PlannedAttention` of decodes that can start at the raw QKV projection."""

    def fuse_qkv_prep(self, slot_mapping: torch.Tensor) -> FusedDecode:
        """Return the fused decode that stores new keys and values to `slot_mapping` (int64 [rows])."""
        ...


class StepAttention:
    """Attention of one step's mixed batch, called layer by layer."""

    def __init__(
        self,
        kv: PagedKV,
        slot_mapping: torch.Tensor,
        decode_count: int,
        decode: PlannedAttention | None,
        prefill: PlannedAttention | None,
    ) -> None:
        self.kv = kv
        self.slot_mapping = slot_mapping
        """KV slots of the tokens, int64 [tokens]."""
        self.decode_count = decode_count
        """Number of decode tokens, which come first."""
        self.decode = decode
        self.prefill = prefill
        self.fused_decode: FusedDecode | None = None
        """Fused QKV-prep decode, if the whole batch supports it."""
        if prefill is None and isinstance(decode, FusedQKVDecode):
            self.fused_decode = decode.fuse_qkv_prep(slot_mapping)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k, v [tokens, kv_heads, d] and attend q [tokens, heads, d] → [tokens, heads, d]."""
        self.kv.store(layer, self.slot_mapping, k, v)
        out, count = torch.empty(q.shape, dtype=q.dtype, device=q.device), self.decode_count
        if self.decode is not None:
            self.decode(layer, q[:count], k[:count], v[:count], out[:count])
        if self.prefill is not None:
            self.prefill(layer, q[count:], k[count:], v[count:], out[count:])
        return out

    def attend_cached(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend q [tokens, heads, d] whose keys and values are already cached; GPUs only."""
        out, count = torch.empty(q.shape, dtype=q.dtype, device=q.device), self.decode_count
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
        """Names of the decode and the prefill backend, as in the options."""
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
