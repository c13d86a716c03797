# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer over random KV; `attention.py` compares backends with it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from common_parts.gpu import median
from mizzen.attention.base import (
    AttentionBackend,
    DecodeRows,
    DevicePlannedDecode,
    Geometry,
    HostPlannedDecode,
    LengthSplitDecode,
    PagedKV,
    PageTable,
    PlannedAttention,
    QueryChunk,
    StepAttention,
)
from mizzen.core.request import Int32

COLD_BYTES = 256 << 20
"""Minimum size in bytes of the KV of all layers: several times a GPU's L2 cache, so that reads miss it."""
LAYERS = 32
REPLAYS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Random KV of several layers, with the page table of its sequences."""

    geometry: Geometry
    kv: PagedKV
    pages: PageTable
    device: torch.device

    @classmethod
    def make(cls, where: str, kv_dtype: str, page_size: int, geometry: Geometry, lengths: Int32) -> Bench:
        """Allocate random KV in scattered pages, for sequences of these lengths in tokens (int32 [rows])."""
        device, counts = torch.device(where), -(-lengths // page_size)
        stored = torch.float8_e4m3fn if kv_dtype == "fp8" else dtype_of(device)
        pages = int(counts.sum())
        kv_slots = pages * page_size
        layer_bytes = 2 * kv_slots * geometry.kv_heads * geometry.head_dim * stored.itemsize
        layers = min(LAYERS, max(2, math.ceil(COLD_BYTES / layer_bytes))) if device.type == "cuda" else 2
        keys, values = (
            torch.empty(layers, kv_slots, geometry.kv_heads, geometry.head_dim, dtype=stored, device=device)
            for _ in range(2)
        )
        for part in (*keys, *values):
            part.copy_(torch.randn(part.shape, dtype=dtype_of(device), device=device))
        table = np.zeros((len(lengths), counts.max()), np.int32)
        used = np.arange(counts.max()) < counts[:, None]
        table[used] = np.random.default_rng(0).permutation(pages)
        windows = (geometry.windows[0],) * layers
        all_layers = Geometry(
            heads=geometry.heads, kv_heads=geometry.kv_heads, head_dim=geometry.head_dim, windows=windows
        )
        return cls(
            geometry=all_layers,
            kv=PagedKV(keys=keys, values=values, page_size=page_size),
            pages=PageTable(host=table, device=torch.from_numpy(table).to(device)),
            device=device,
        )

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.kv.keys)

    def random(self, tokens: int, heads: int) -> torch.Tensor:
        """Return random values [tokens, heads, head_dim] in the dtype of activations."""
        size = (tokens, heads, self.geometry.head_dim)
        return torch.randn(size, dtype=dtype_of(self.device), device=self.device)


def dtype_of(device: torch.device) -> torch.dtype:
    """Return the dtype of weights and activations on a device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def seconds_of(step: Callable[[], None], device: torch.device, rounds: int) -> float:
    """Return the seconds per call of `step`: the median of the rounds.

    On a GPU, a round consists of several calls.
    """
    cuda, repeats = device.type == "cuda", REPLAYS if device.type == "cuda" else 1
    for _ in range(2):
        step()
    times: list[float] = []
    for _ in range(rounds):
        if cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats):
                step()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / repeats)
        else:
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    return median(times)


class Decodes:
    """A batch of decodes to measure; its input is the raw output of the QKV projection.

    With `by_length`, the backend uses length-aware splits.
    """

    def __init__(
        self, bench: Bench, backend: AttentionBackend, lengths: Int32, norm: bool, *, by_length: bool = False
    ) -> None:
        if by_length and not (isinstance(backend, LengthSplitDecode) and backend.concurrent_splits):
            raise ValueError("it does not support length-aware splits")
        self.bench, self.backend, self.by_length = bench, backend, by_length
        geometry, device, page = bench.geometry, bench.device, bench.kv.page_size
        rows, end = len(lengths), lengths - 1
        self.slots = np.arange(rows)
        self.lengths = lengths
        last = bench.pages.host[self.slots, end // page].astype(np.int64)
        self.slot_mapping = torch.from_numpy(last * page + end % page).to(device)
        self.qkv = bench.random(rows, geometry.heads + 2 * geometry.kv_heads)
        ones = torch.ones(geometry.head_dim, dtype=self.qkv.dtype, device=device)
        self.norms = (ones, ones) if norm else None
        self.cos, self.sin = torch.ones(2, rows, 1, geometry.head_dim // 2, device=device)
        self.out = torch.empty_like(self.qkv[:, : geometry.heads])
        self.graph_inputs: tuple[torch.Tensor, ...] = ()
        """Tensors that the captured graph reads; they must stay alive."""

    def run_layers(self, run: PlannedAttention) -> None:
        """Run all layers with the planned attention of the batch."""
        bench, attend = (
            self.bench,
            StepAttention(self.bench.kv, self.slot_mapping, len(self.slots), run, None),
        )
        flat = self.qkv.view(len(self.qkv), -1)
        for layer in range(bench.layers):
            if attend.fused_decode is not None:
                attend.fused_decode(layer, flat, self.norms, 1e-6, self.cos, self.sin, self.out)
            elif bench.device.type == "cuda":
                from mizzen.kernels.attention.qk_norm_rope import qk_norm_rope

                stored = (self.slot_mapping, bench.kv.keys[layer], bench.kv.values[layer])
                q = qk_norm_rope(flat, self.norms, 1e-6, self.cos, self.sin, *stored)
                run(layer, q, None, None, self.out)
            else:
                heads = bench.geometry.heads
                q, k, v = self.qkv.split((heads, *[bench.geometry.kv_heads] * 2), dim=1)
                attend(layer, q, k, v)

    def run_eagerly(self) -> None:
        """Plan the batch and run all layers, kernel by kernel."""
        rows = DecodeRows(slots=self.slots, lengths=self.lengths, pages=self.bench.pages)
        self.run_layers(self.backend.plan_decode(rows))

    def capture(self, backend: DevicePlannedDecode) -> Callable[[], None]:
        """Capture all layers in a CUDA graph, and return the graph's replay function."""
        slots = torch.from_numpy(self.slots.astype(np.int32)).to(self.bench.device)
        lengths = torch.ones_like(slots)
        self.graph_inputs = (slots, lengths)
        graph, table = torch.cuda.CUDAGraph(), self.bench.pages.device
        plan = backend.plan_decode_on_device
        if self.by_length and isinstance(backend, LengthSplitDecode):
            plan = backend.plan_length_splits_on_device
        self.run_layers(plan(slots, lengths, table))  # loads kernels
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.run_layers(plan(slots, lengths, table))
        lengths.copy_(torch.from_numpy(self.lengths))
        if isinstance(backend, HostPlannedDecode):
            backend.refresh(len(self.slots), self.lengths)
        return graph.replay

    def seconds(self, rounds: int) -> float:
        """Return the seconds of one layer: the median of the rounds."""
        step = (
            self.capture(self.backend) if isinstance(self.backend, DevicePlannedDecode) else self.run_eagerly
        )
        return seconds_of(step, self.bench.device, rounds) / self.bench.layers


def chunk_seconds(bench: Bench, backend: AttentionBackend, count: int, prefix: int, rounds: int) -> float:
    """Return the seconds of one layer's attention for a prefill chunk: the median of the rounds.

    The chunk has `count` tokens, which follow `prefix` cached tokens.
    """
    geometry = bench.geometry
    q = bench.random(count, geometry.heads)
    k, v = bench.random(count, geometry.kv_heads), bench.random(count, geometry.kv_heads)
    out, chunks = torch.empty_like(q), (QueryChunk(slot=0, start=prefix, count=count),)

    def step() -> None:
        run = backend.plan_prefill(chunks, bench.pages)
        for layer in range(bench.layers):
            run(layer, q, k, v, out)

    return seconds_of(step, bench.device, rounds) / bench.layers
