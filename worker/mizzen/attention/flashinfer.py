"""FlashInfer (arXiv 2501.01005) over paged KV, with its fa2 and its fa3 kernel template.

Its kernels are cut to a batch by a plan that the host makes from the lengths. The lists of pages are made on
the device. A captured batch of decodes is planned again before each replay (`refresh`), while the step before
it runs; a plan's buffer in pinned memory is written once the copy of the plan before it is done, which is
when that step is.
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
    QueryChunk,
    DecodeRows,
    Geometry,
    KVFormat,
    PagedKV,
    PageTable,
    PlannedAttention,
    unsupported_error,
)
from mizzen.core.request import Int32

if TYPE_CHECKING:
    from mizzen.kernels.attention.page_indices import PageIndices

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
HEADS = (64, 128, 256)
FLOAT_BYTES = 256 << 20
"""Workspace of partial results at least, which all plans share: kernels follow one another."""
PLAN_BYTES = 1 << 20
ROW_BYTES = 32
"""A plan of decodes takes so much for each row (and head, with fa3) at most, beside `PLAN_BYTES`."""
TILE = 16
"""Query heads and rows that a program of a decode takes together."""
SPARE_TILES = 512
"""Programs that a batch may be cut into more than it has tiles."""


def unsupported_reason(geometry: Geometry, kv: KVFormat, template: str = "fa2") -> str | None:
    """Tell what keeps this backend from running here; None when nothing does."""
    device = kv.device
    least = 9 if template == "fa3" else 8
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < least:
        return f"it needs an NVIDIA GPU of compute capability {least}.0 or above"
    if template == "fa3" and torch.cuda.get_device_capability(device) != (9, 0):
        return "it needs a Hopper GPU"
    if kv.dtype not in DTYPES or (template == "fa3" and kv.quantized):
        served = "bfloat16 or float16" + ("" if template == "fa3" else ", or float8 for KV")
        return f"it needs {served}, not {str(kv.dtype).removeprefix('torch.')}"
    if geometry.head_dim not in HEADS:
        return f"head_dim must be one of {HEADS}, not {geometry.head_dim}"
    if importlib.util.find_spec("flashinfer") is None:
        return "it needs the package flashinfer-python (pip install 'mizzen[gpu]')"
    if not (has_compiled_kernels() or has_compiler()):
        return (
            "its kernels are not compiled, and no nvcc is here to do it: it needs the package "
            "flashinfer-jit-cache, of the version of flashinfer-python (docs/images.md)"
        )
    return None


def has_compiled_kernels() -> bool:
    """Tell whether kernels come with the package, or with the one that is made for that."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return True
    package = importlib.util.find_spec("flashinfer")
    folders = (package and package.submodule_search_locations) or ()
    return any(next(Path(folder, "data/aot").glob("*/*.so"), None) for folder in folders)


def has_compiler() -> bool:
    """Tell whether there is an nvcc where FlashInfer looks for one."""
    if given := os.environ.get("FLASHINFER_NVCC"):
        return shutil.which(given) is not None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc"):
        return True
    return shutil.which(f"{home or '/usr/local/cuda'}/bin/nvcc") is not None


def starts_of(counts: NDArray[np.int32]) -> torch.Tensor:
    """Return where each of several runs of so many entries begins, and where the last ends; pinned."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return torch.from_numpy(starts).pin_memory()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBatch:
    """Lengths of a batch, as the host plans with them."""

    starts: torch.Tensor
    """int32 [rows + 1] in pinned memory, where each row's pages begin."""
    last: torch.Tensor
    """int32 [rows] in pinned memory, tokens in each last page."""
    lengths: torch.Tensor
    """int32 [rows]."""

    @classmethod
    def of(cls, lengths: Int32, page_size: int) -> HostBatch:
        """Take a batch of so many tokens a row."""
        counts = -(-lengths // page_size)
        return cls(
            starts=starts_of(counts),
            last=torch.from_numpy(lengths - (counts - 1) * page_size).pin_memory(),
            lengths=torch.from_numpy(lengths),
        )


class Fence:
    """Keeps a plan's pinned buffer from being written before the device has read it."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None

    def plan(self, make: Callable[[], None]) -> None:
        """PlannedAttention a function that enqueues a copy of the buffer."""
        if self.event is not None:
            self.event.synchronize()
        make()
        self.event = torch.cuda.Event()
        self.event.record()


class GraphBatch:
    """The wrappers of a captured batch of `rows` decodes, one a window."""

    def __init__(self, backend: FlashInferAttention, rows: int, lists: PageIndices) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self.backend, self.lists = backend, lists
        self.wrappers: dict[int | None, Any] = {}
        self.fence = Fence()
        for window, plan in backend.decode_plans.items():
            wrapper = BatchDecodeWithPagedKVCacheWrapper(
                backend.graph_workspace,
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=lists.starts,
                paged_kv_indices_buffer=lists.pages,
                paged_kv_last_page_len_buffer=lists.last,
                backend=backend.template,
            )
            wrapper.reset_workspace_buffer(backend.graph_workspace, plan)
            self.wrappers[window] = wrapper
        ones = HostBatch.of(np.ones(rows, np.int32), backend.kv.page_size)
        pages = torch.zeros(rows, dtype=torch.int32, device=backend.device)
        self.fence.plan(lambda: self.first(ones, pages))

    def first(self, batch: HostBatch, pages: torch.Tensor) -> None:
        """Plan so that the wrappers know all but the lengths."""
        for window, wrapper in self.wrappers.items():
            wrapper.plan(batch.starts, pages, batch.last, seq_lens=batch.lengths, **self.backend.how(window))

    def refresh(self, lengths: Int32) -> None:
        """Plan for new lengths; the lists on the device are made by the captured step."""
        from flashinfer.decode import fast_decode_plan

        batch = HostBatch.of(lengths, self.backend.kv.page_size)

        def make() -> None:
            for window, wrapper in self.wrappers.items():
                fast_decode_plan(
                    wrapper,
                    batch.starts,
                    batch.starts[:0],
                    batch.last,
                    global_override_indptr_cpu=batch.starts,
                    **self.backend.how(window),
                )

        self.fence.plan(make)


class FlashInferAttention(AttentionBackend):
    """One plan a step, part of the batch and window; one call a layer and part."""

    def __init__(self, geometry: Geometry, kv: PagedKV, template: str = "fa2") -> None:
        """Load the package.

        Raises:
            ValueError: the device, the precision or the shape of heads is none that it serves.
            ImportError: the package is broken.
        """
        super().__init__(geometry, kv)
        if why := unsupported_reason(geometry, kv, template):
            raise unsupported_error("attention flashinfer", why)
        from mizzen.kernels import set_compiler_cache_dirs

        set_compiler_cache_dirs()
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

        self.template = template
        self.device = kv.keys.device
        # FlashInfer asks for zeros at first.
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
        # One each: what plans the second part of a step must not wait for the first.
        self.prefill_fence, self.decode_fence = Fence(), Fence()
        self.graph_workspace = self.workspace
        self.decode_plans: dict[int | None, torch.Tensor] = {}
        """Plans of captured batches; replays follow one another, so that those of a window share one."""
        self.lists: PageIndices | None = None
        """Of the largest captured batch; the others use its head."""
        self.graphs: dict[int, GraphBatch] = {}

    def make_room(self, rows: int, columns: int) -> PageIndices:
        """Allocate what captured batches of at most `rows` share; return their lists."""
        from mizzen.kernels.attention.page_indices import PageIndices

        geometry = self.geometry
        self.lists = PageIndices.allocate(rows, rows * columns, self.device)
        size = PLAN_BYTES + ROW_BYTES * rows * (geometry.heads if self.template == "fa3" else 1)
        self.decode_plans = {
            window: torch.empty(size, dtype=torch.uint8, device=self.device)
            for window in set(geometry.windows)
        }
        tiles = rows + -(-rows * geometry.gqa_group_size // TILE) + SPARE_TILES
        partial = 4 * geometry.heads * tiles * TILE * (geometry.head_dim + 1)
        if partial > len(self.graph_workspace):
            self.graph_workspace = torch.zeros(partial, dtype=torch.uint8, device=self.device)
        return self.lists

    def how(self, window: int | None) -> dict[str, Any]:
        """Return what is the same in all plans of decodes."""
        geometry, stored = self.geometry, self.kv.keys.dtype
        return {
            "num_qo_heads": geometry.heads,
            "num_kv_heads": geometry.kv_heads,
            "head_dim": geometry.head_dim,
            "page_size": self.kv.page_size,
            "window_left": -1 if window is None else window - 1,
            "q_data_type": torch.bfloat16 if self.kv.quantized else stored,
            "kv_data_type": stored,
        }

    def runner(self, wrappers: dict[int | None, Any]) -> PlannedAttention:
        """Return attention by planned wrappers."""
        windows = self.geometry.windows

        def run(layer: int, q: torch.Tensor, k: object, v: object, out: torch.Tensor) -> None:
            wrappers[windows[layer]].run(q, (self.keys[layer], self.values[layer]), out=out)

        return run

    def listed(self, slots: NDArray[Any], lengths: Int32, pages: PageTable, total: int) -> PageIndices:
        """List the pages of a batch whose lengths the host knows."""
        from mizzen.kernels.attention.page_indices import PageIndices, build_page_indices

        packed = torch.from_numpy(np.stack([slots.astype(np.int32), lengths])).pin_memory()
        packed = packed.to(self.device, non_blocking=True)
        lists = PageIndices.allocate(len(slots), total, self.device)
        build_page_indices(packed[0], packed[1], pages.device, self.kv.page_size, lists)
        return lists

    def plan_decode(self, rows: DecodeRows) -> PlannedAttention:
        """Prepare a batch of decodes."""
        batch = HostBatch.of(rows.lengths.astype(np.int32), self.kv.page_size)
        lists = self.listed(rows.slots, rows.lengths, rows.pages, int(batch.starts[-1]))

        def make() -> None:
            for window, wrapper in self.decodes.items():
                how = self.how(window)
                wrapper.plan(batch.starts, lists.pages, batch.last, seq_lens=batch.lengths, **how)

        self.decode_fence.plan(make)
        return self.runner(self.decodes)

    def plan_decode_on_device(self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> PlannedAttention:
        """Prepare a batch that is replayed; `refresh` plans each replay.

        The first batch is the largest. PlannedAttention outside of a capture, lengths are 1.

        Args:
            slots: int32 [rows], rows of the page table.
            lengths: int32 [rows], tokens whose KV is read, the query's own included.
            table: int32 [slots, columns].
        """
        from mizzen.kernels.attention.page_indices import build_page_indices

        rows = len(slots)
        batch = self.graphs.get(rows)
        if batch is None:
            lists = self.lists
            if lists is None or len(lists.last) < rows:
                lists = self.make_room(rows, table.shape[1])
            batch = self.graphs[rows] = GraphBatch(self, rows, lists.head(rows))
        build_page_indices(slots, lengths, table, self.kv.page_size, batch.lists)
        return self.runner(batch.wrappers)

    def refresh(self, rows: int, lengths: Int32) -> None:
        """Plan the next replay of a batch of `rows`, of which the last ones may be padding.

        Args:
            rows: the captured batch.
            lengths: int32 [at most rows], tokens whose KV each row reads; those of padding are 1.
        """
        padded = np.ones(rows, np.int32)
        padded[: len(lengths)] = lengths
        self.graphs[rows].refresh(padded)

    def plan_prefill(self, chunks: tuple[QueryChunk, ...], pages: PageTable) -> PlannedAttention:
        """Prepare prefill chunks as one batch of sequences of different lengths."""
        queries = starts_of(np.array([chunk.count for chunk in chunks], np.int32))
        ends = np.array([chunk.end for chunk in chunks], np.int32)
        slots = np.array([chunk.slot for chunk in chunks], np.int32)
        batch = HostBatch.of(ends, self.kv.page_size)
        lists = self.listed(slots, ends, pages, int(batch.starts[-1]))

        def make() -> None:
            for window, wrapper in self.prefills.items():
                how = self.how(window)
                head_dim = how.pop("head_dim")
                wrapper.plan(
                    queries,
                    batch.starts,
                    lists.pages,
                    batch.last,
                    head_dim_qk=head_dim,
                    causal=True,
                    seq_lens=batch.lengths,
                    **how,
                )

        self.prefill_fence.plan(make)
        return self.runner(self.prefills)
