# SPDX-License-Identifier: Apache-2.0
"""FlashInfer backend (arXiv 2501.01005) over paged KV, with FlashInfer's fa2 and fa3 kernel templates.

The host plans the tiling of a batch from its lengths; page indices are built on the device. A captured batch
of decodes is planned again before each replay (`refresh`), while the previous step still runs. A plan is
copied to the device from a pinned buffer, in stream order and thus after the previous step; the buffer is
overwritten only once that copy is complete.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mizzen.attention.base import (
    AttentionBackend,
    DecodeRows,
    Geometry,
    KVFormat,
    PagedKV,
    PageTable,
    PlannedAttention,
    QueryChunk,
)
from mizzen.attention.requirements import find_unmet_requirement, unsupported_error
from mizzen.core.request import Int32

if TYPE_CHECKING:
    from mizzen.kernels.attention.page_indices import PageIndices

FA3_DTYPES = (torch.bfloat16, torch.float16)
DTYPES = (*FA3_DTYPES, torch.float8_e4m3fn)
HEAD_DIMS = (64, 128, 256)
FLOAT_BYTES = 256 << 20
"""Minimum size of the workspace for partial results, in bytes. All plans share the workspace, because the
kernels of a stream run one after another."""
PLAN_BYTES = 1 << 20
"""Size of a decode plan in bytes, not counting `ROW_BYTES` per row."""
ROW_BYTES = 32
"""Maximum number of bytes that each row adds to a decode plan. With the fa3 template, this
is the maximum for each query head of each row."""
TILE = 16
"""Number of (row, query head) pairs that a decode program processes together."""
SPARE_TILES = 512
"""Maximum number of programs that a decode batch has in addition to one per tile of `TILE` pairs."""


def unsupported_reason(geometry: Geometry, kv: KVFormat, template: str = "fa2") -> str | None:
    """Return the reason why this backend does not support a KV cache or model; None if it does.

    `template` is fa2 or fa3.
    """
    is_fa3 = template == "fa3"
    reason = find_unmet_requirement(
        kv,
        geometry.head_dim,
        min_capability=9 if is_fa3 else 8,
        hopper=is_fa3,
        dtypes=FA3_DTYPES if is_fa3 else DTYPES,
        dtype_names="bfloat16 or float16" if is_fa3 else "bfloat16 or float16, or float8 for KV",
        head_dims=HEAD_DIMS,
    )
    if reason is not None:
        return reason
    if geometry.softcap is not None:
        return "it does not support attn_logit_softcapping"
    if geometry.has_sinks:
        return "it does not support attention sinks"
    if importlib.util.find_spec("flashinfer") is None:
        return "it needs the package flashinfer-python (pip install 'mizzen[gpu]')"
    if not (has_compiled_kernels() or has_compiler()):
        return (
            "its kernels are not compiled, and there is no nvcc to compile them: it needs the package "
            "flashinfer-jit-cache in the version of flashinfer-python (docs/images.md)"
        )
    return None


def has_compiled_kernels() -> bool:
    """Return whether compiled kernels are installed, in flashinfer-jit-cache or in FlashInfer itself."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return True
    package = importlib.util.find_spec("flashinfer")
    folders = (package and package.submodule_search_locations) or ()
    return any(next(Path(folder, "data/aot").glob("*/*.so"), None) for folder in folders)


def has_compiler() -> bool:
    """Return whether an nvcc exists where FlashInfer looks for one."""
    if nvcc := os.environ.get("FLASHINFER_NVCC"):
        return shutil.which(nvcc) is not None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc"):
        return True
    return shutil.which(f"{home or '/usr/local/cuda'}/bin/nvcc") is not None


def make_indptr(counts: NDArray[np.int32]) -> torch.Tensor:
    """Return the offsets at which consecutive runs of entries start, and the end of the last run.

    `counts` is the number of entries of each run. The result is int32 [len(counts) + 1], in pinned memory.
    """
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return torch.from_numpy(starts).pin_memory()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBatch:
    """Lengths of a batch on the host, from which FlashInfer makes its plan."""

    indptr: torch.Tensor
    """Index at which each row's pages start in the list of all rows' pages, then the length of that list,
    int32 [rows + 1], pinned."""
    last_page_len: torch.Tensor
    """Number of tokens in each row's last page, int32 [rows], pinned."""
    lengths: torch.Tensor
    """Number of tokens of each row, int32 [rows]."""

    @classmethod
    def for_lengths(cls, lengths: Int32, page_size: int) -> HostBatch:
        """Make a batch from the rows' lengths in tokens (int32 [rows], at least 1) and the page size."""
        counts = -(-lengths // page_size)
        return cls(
            indptr=make_indptr(counts),
            last_page_len=torch.from_numpy(lengths - (counts - 1) * page_size).pin_memory(),
            lengths=torch.from_numpy(lengths),
        )


class PlanFence:
    """Keeps a plan's pinned buffer from being overwritten before the device has read it."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None

    def run(self, make: Callable[[], None]) -> None:
        """Wait until the last copy of the buffer is done; then call `make`, which enqueues the next copy."""
        if self.event is not None:
            self.event.synchronize()
        make()
        self.event = torch.cuda.Event()
        self.event.record()


class CapturedDecodeBatch:
    """A captured batch of `rows` decodes, with a FlashInfer wrapper for each window size of the layers."""

    def __init__(self, backend: FlashInferAttention, rows: int, page_indices: PageIndices) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self.backend, self.page_indices = backend, page_indices
        self.wrappers: dict[int | None, Any] = {}
        self.fence = PlanFence()
        for window, plan in backend.decode_plans.items():
            wrapper = BatchDecodeWithPagedKVCacheWrapper(
                backend.graph_workspace,
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=page_indices.indptr,
                paged_kv_indices_buffer=page_indices.indices,
                paged_kv_last_page_len_buffer=page_indices.last_page_len,
                backend=backend.template,
            )
            wrapper.reset_workspace_buffer(backend.graph_workspace, plan)
            self.wrappers[window] = wrapper
        ones = HostBatch.for_lengths(np.ones(rows, np.int32), backend.kv.page_size)
        pages = torch.zeros(rows, dtype=torch.int32, device=backend.device)
        self.fence.run(lambda: self.plan_first(ones, pages))

    def plan_first(self, batch: HostBatch, pages: torch.Tensor) -> None:
        """Make the first plan of each wrapper; `refresh` reuses everything in it except for the lengths."""
        for window, wrapper in self.wrappers.items():
            wrapper.plan(
                batch.indptr,
                pages,
                batch.last_page_len,
                seq_lens=batch.lengths,
                **self.backend.plan_arguments(window),
            )

    def refresh(self, lengths: Int32) -> None:
        """Plan for new lengths (int32 [rows]); the captured step builds the page indices on the device."""
        from flashinfer.decode import fast_decode_plan

        batch = HostBatch.for_lengths(lengths, self.backend.kv.page_size)

        def make() -> None:
            for window, wrapper in self.wrappers.items():
                fast_decode_plan(
                    wrapper,
                    batch.indptr,
                    batch.indptr[:0],
                    batch.last_page_len,
                    global_override_indptr_cpu=batch.indptr,
                    **self.backend.plan_arguments(window),
                )

        self.fence.run(make)


class FlashInferAttention(AttentionBackend):
    """FlashInfer backend.

    It makes one plan per step, window and kind (decode or prefill), and one kernel call per layer and kind.
    """

    def __init__(self, geometry: Geometry, kv: PagedKV, template: str = "fa2") -> None:
        """Load the package.

        Raises:
            ValueError: the device, dtype or geometry is not supported.
            ImportError: the package is broken.
        """
        super().__init__(geometry, kv)
        if reason := unsupported_reason(geometry, kv, template):
            raise unsupported_error("attention flashinfer", reason)
        from mizzen.kernels import set_compiler_cache_dirs

        set_compiler_cache_dirs()
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

        self.template = template
        self.device = kv.keys.device
        # FlashInfer requires a zero-initialised workspace.
        self.workspace = torch.zeros(FLOAT_BYTES, dtype=torch.uint8, device=self.device)
        paged = (kv.keys.shape[0], -1, kv.page_size, geometry.kv_heads, geometry.head_dim)
        self.keys, self.values = kv.keys.view(paged), kv.values.view(paged)
        self.prefills: dict[int | None, Any] = {}
        self.decodes: dict[int | None, Any] = {}
        for window in set(geometry.windows):
            self.prefills[window] = BatchPrefillWithPagedKVCacheWrapper(self.workspace, backend=template)
            self.decodes[window] = BatchDecodeWithPagedKVCacheWrapper(
                self.workspace, use_tensor_cores=True, backend=template
            )
        # One fence per kind, so that planning the second kind of a step does not wait for the first.
        self.prefill_fence, self.decode_fence = PlanFence(), PlanFence()
        self.graph_workspace = self.workspace
        self.decode_plans: dict[int | None, torch.Tensor] = {}
        """Device buffer for the plan of each window; captured batches share these buffers, because replays
        never overlap."""
        self.page_indices: PageIndices | None = None
        """Page indices of the largest captured batch; smaller batches use the first entries of its lists."""
        self.graphs: dict[int, CapturedDecodeBatch] = {}

    def allocate_for_graphs(self, rows: int, columns: int) -> PageIndices:
        """Allocate the memory that captured batches of up to `rows` rows share; return their page indices.

        `columns` is the number of columns of the page table.
        """
        from mizzen.kernels.attention.page_indices import PageIndices

        geometry = self.geometry
        self.page_indices = PageIndices.allocate(rows, rows * columns, self.device)
        size = PLAN_BYTES + ROW_BYTES * rows * (geometry.heads if self.template == "fa3" else 1)
        self.decode_plans = {
            window: torch.empty(size, dtype=torch.uint8, device=self.device)
            for window in set(geometry.windows)
        }
        tiles = rows + -(-rows * geometry.gqa_group_size // TILE) + SPARE_TILES
        partial = 4 * geometry.heads * tiles * TILE * (geometry.head_dim + 1)
        if partial > len(self.graph_workspace):
            self.graph_workspace = torch.zeros(partial, dtype=torch.uint8, device=self.device)
        return self.page_indices

    def plan_arguments(self, window: int | None) -> dict[str, Any]:
        """Return the batch-independent arguments of FlashInfer's plan functions for a sliding window."""
        geometry, stored = self.geometry, self.kv.keys.dtype
        return {
            "num_qo_heads": geometry.heads,
            "num_kv_heads": geometry.kv_heads,
            "head_dim": geometry.head_dim,
            "page_size": self.kv.page_size,
            "window_left": -1 if window is None else window - 1,
            "sm_scale": geometry.score_scale,
            "q_data_type": torch.bfloat16 if self.kv.quantized else stored,
            "kv_data_type": stored,
        }

    def planned_attention(self, wrappers: dict[int | None, Any]) -> PlannedAttention:
        """Return the planned attention that runs `wrappers`, one per window."""
        windows = self.geometry.windows

        def run(layer: int, q: torch.Tensor, k: object, v: object, out: torch.Tensor) -> None:
            wrappers[windows[layer]].run(q, (self.keys[layer], self.values[layer]), out=out)

        return run

    def build_indices(self, slots: NDArray[Any], lengths: Int32, pages: PageTable, total: int) -> PageIndices:
        """Build page indices on the device; `slots` and `lengths` [rows] are host arrays.

        `total` is the total number of pages of all rows.
        """
        from mizzen.kernels.attention.page_indices import PageIndices, build_page_indices

        packed = torch.from_numpy(np.stack([slots.astype(np.int32), lengths])).pin_memory()
        packed = packed.to(self.device, non_blocking=True)
        page_indices = PageIndices.allocate(len(slots), total, self.device)
        build_page_indices(packed[0], packed[1], pages.device, self.kv.page_size, page_indices)
        return page_indices

    def plan_decode(self, rows: DecodeRows) -> PlannedAttention:
        """Plan a batch of decodes."""
        batch = HostBatch.for_lengths(rows.lengths.astype(np.int32), self.kv.page_size)
        page_indices = self.build_indices(rows.slots, rows.lengths, rows.pages, int(batch.indptr[-1]))

        def make() -> None:
            for window, wrapper in self.decodes.items():
                arguments = self.plan_arguments(window)
                wrapper.plan(
                    batch.indptr,
                    page_indices.indices,
                    batch.last_page_len,
                    seq_lens=batch.lengths,
                    **arguments,
                )

        self.decode_fence.run(make)
        return self.planned_attention(self.decodes)

    def plan_decode_on_device(
        self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> PlannedAttention:
        """Plan a batch of decodes that will be captured; `refresh` plans each replay.

        The largest batch must be planned first. Until `refresh` is called, the plan assumes that all lengths
        are 1, so if the batch is run without being captured, its lengths must be 1.

        Args:
            slots: Row of the page table for each decode row, int32 [rows].
            lengths: Number of tokens whose KV each row reads, including the query token itself, int32 [rows].
            table: Page table, int32 [slots, columns].
        """
        from mizzen.kernels.attention.page_indices import build_page_indices

        rows = len(slots)
        batch = self.graphs.get(rows)
        if batch is None:
            page_indices = self.page_indices
            if page_indices is None or len(page_indices.last_page_len) < rows:
                page_indices = self.allocate_for_graphs(rows, table.shape[1])
            batch = self.graphs[rows] = CapturedDecodeBatch(self, rows, page_indices.head(rows))
        build_page_indices(slots, lengths, table, self.kv.page_size, batch.page_indices)
        return self.planned_attention(batch.wrappers)

    def refresh(self, rows: int, lengths: Int32) -> None:
        """Plan the next replay of a captured batch, whose last rows may be padding.

        Args:
            rows: Number of rows of the captured batch.
            lengths: Number of tokens whose KV each row reads, int32 [at most rows]; without padding rows.
        """
        padded = np.ones(rows, np.int32)
        padded[: len(lengths)] = lengths
        self.graphs[rows].refresh(padded)

    def plan_prefill(self, chunks: tuple[QueryChunk, ...], pages: PageTable) -> PlannedAttention:
        """Plan prefill chunks as one batch of sequences of different lengths."""
        queries = make_indptr(np.array([chunk.count for chunk in chunks], np.int32))
        ends = np.array([chunk.end for chunk in chunks], np.int32)
        slots = np.array([chunk.slot for chunk in chunks], np.int32)
        batch = HostBatch.for_lengths(ends, self.kv.page_size)
        page_indices = self.build_indices(slots, ends, pages, int(batch.indptr[-1]))

        def make() -> None:
            for window, wrapper in self.prefills.items():
                arguments = self.plan_arguments(window)
                head_dim = arguments.pop("head_dim")
                wrapper.plan(
                    queries,
                    batch.indptr,
                    page_indices.indices,
                    batch.last_page_len,
                    head_dim_qk=head_dim,
                    causal=True,
                    seq_lens=batch.lengths,
                    **arguments,
                )

        self.prefill_fence.run(make)
        return self.planned_attention(self.prefills)
