# SPDX-License-Identifier: Apache-2.0
"""Tilings of GEMMs over packed weights fit the GPU, and every kernel they need compiles without spills."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from random_weights import make_weight

pytest.importorskip("cuda.bindings", reason="this PyTorch comes without CUDA's bindings")
pytest.importorskip("triton", reason="this PyTorch comes without Triton")

from machine_code import disassemble

from mizzen.kernels import nvrtc
from mizzen.kernels.gemm import packed_small
from mizzen.kernels.gemm.fragments import PackedWeight, ScaleLayout, chunk_columns, pack_weight
from mizzen.kernels.gemm.gemv import PreNorm
from mizzen.kernels.gemm.packed_small_tiles import (
    SM_COUNT,
    TILE_CONFIGS,
    PackedFormat,
    SmallTileConfig,
    select_tile_config,
)
from mizzen.layers.linear_methods import packed as packed_method
from mizzen.layers.linear_methods.base import LinearKind, LinearPart, LinearSpec
from mizzen.layers.linear_methods.packed import PackedLinear
from mizzen.layers.quantized.canonical import Codes
from mizzen.models.block import Activation
from mizzen.quantization.schemes import Fp8Layout, Fp8Weights, ScaleShape

HOPPER = (9, 0)
FORMATS = {
    "int4": (Codes.UINT4, ScaleLayout.GROUP, torch.bfloat16, 128),
    "int4 by 32": (Codes.UINT4, ScaleLayout.GROUP, torch.float32, 32),
    "int8": (Codes.INT8, ScaleLayout.ROW, torch.float32, 0),
    "int8 by 128": (Codes.INT8, ScaleLayout.GROUP, torch.float16, 128),
    "fp8 in blocks": (Codes.E4M3, ScaleLayout.OCTET, torch.float32, 128),
    "fp8": (Codes.E4M3, ScaleLayout.ROW, torch.float32, 0),
}
SHAPES = [
    (24576, 4096, True),
    (4096, 12288, False),
    (6144, 4096, False),
    (4096, 4096, False),
    (51200, 5120, True),
    (3584, 18944, False),
    (1536, 4096, False),
    (12288, 4096, True),
    (12288, 2048, True),
    (4096, 6144, False),
    (8192, 3584, False),
    (57344, 8192, True),
    (64, 64, False),
    (640, 1088, True),
]


def make_format(name: str, rows: int, columns: int, *, swiglu: bool, zeros: bool = False) -> PackedFormat:
    codes, layout, dtype, group = FORMATS[name]
    return PackedFormat(
        codes=codes,
        strips=-(-rows // 64),
        columns=columns,
        layout=layout,
        dtype=dtype,
        has_zeros=zeros,
        group_columns=group,
        swiglu=swiglu,
    )


@pytest.mark.parametrize("name", FORMATS)
def test_every_batch_has_a_tiling_that_fits_the_gpu(name: str) -> None:
    for rows, columns, swiglu in SHAPES:
        for zeros in (False, True):
            weight = make_format(name, rows, columns, swiglu=swiglu, zeros=zeros)
            for count in range(1, 17):
                config = select_tile_config(weight, count)
                assert config is not None and config.supports(weight, count), (weight, count)
                blocks = -(-weight.strips * 4 // config.tiles // config.units) * config.split_k
                assert blocks <= SM_COUNT * config.blocks_per_sm, (weight, count)


def test_rows_of_x_that_do_not_fit_in_shared_memory_have_no_tiling() -> None:
    weight = make_format("int4", 4096, 65536, swiglu=False)
    assert select_tile_config(weight, 1) is not None
    assert select_tile_config(weight, 16) is None


def test_tilings_with_too_few_columns_slots_or_rows_are_refused() -> None:
    weight = make_format("int4", 4096, 4096, swiglu=False)
    config = SmallTileConfig(4, 1, 1, 8, 2, 4)
    assert config.supports(weight, 1)
    assert not replace(config, slots=1).supports(weight, 1)
    assert not replace(config, slots=8).supports(weight, 1)
    assert not replace(config, split_k=8).supports(weight, 1)
    assert not replace(config, tiles=2, split_k=4).supports(weight, 1)
    assert not config.supports(replace(weight, columns=64), 1)
    assert not config.supports(replace(weight, group_columns=96), 1)


def has_norm(rows: int, columns: int) -> bool:
    """Return whether a shape of `SHAPES` is that of a layer behind a norm; the others follow a product."""
    return (rows, columns) in ((24576, 4096), (6144, 4096))


@pytest.mark.parametrize(("count", "name"), [(count, name) for count in (1, 8) for name in FORMATS])
def test_kernels_compile_without_spills_and_load_weights_before_the_pdl_wait(
    count: int, name: str, tmp_path: Path
) -> None:
    # Compiling takes seconds, so each case has one of the four shapes.
    rows, columns, swiglu = SHAPES[(list(FORMATS).index(name) + count // 8) % 4]
    weight = make_format(name, rows, columns, swiglu=swiglu)
    config = select_tile_config(weight, count)
    assert config is not None
    norm = count == 1 and has_norm(rows, columns)
    defines = packed_small.compile_definitions(weight, config, count, norm=norm)
    cubin = nvrtc.compile_cubin(packed_small.SOURCE, "packed_small", defines, HOPPER)
    assert "STACK:0 " in disassemble(cubin, tmp_path, "--dump-resource-usage"), (weight, config)
    order = re.findall(r"\b(UBLKCP|LDG|ACQBULK|HMMA\.16816)", disassemble(cubin, tmp_path, "--dump-sass"))
    assert order.index("UBLKCP") < order.index("ACQBULK") < order.index("HMMA.16816")
    # A thread of 256 loads two vectors of the norm's weight, and then two each of x and the residual stream.
    before = order[: order.index("ACQBULK")].count("LDG")
    assert (before, order.count("LDG")) == ((2, 6) if norm else (0, 0))


@pytest.mark.parametrize("swiglu", [False, True])
def test_gemms_load_exactly_the_kernels_compiled_at_start_up(
    swiglu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, launches = set(), []
    monkeypatch.setattr(packed_small, "load_kernel", lambda *kernel: loaded.add(kernel[:-1]))
    monkeypatch.setattr(packed_small, "launch", lambda *arguments, **options: launches.append(options))
    packed = pack_weight(make_weight(Codes.UINT4, 512, 4096, 1, 128, dtype=torch.bfloat16), swiglu=swiglu)
    for count in range(1, packed_small.MAX_BATCH + 1):
        x = torch.zeros((count, 4096), dtype=torch.bfloat16)
        out = packed_small.packed_small_gemm(packed, x, swiglu=swiglu)
        assert out.shape == (count, 256 if swiglu else 512)
    assert loaded == packed_small.kernel_specs(packed, range(1, 257))
    assert len(loaded) == 3 and len(launches) == packed_small.MAX_BATCH


def make_method(*, swiglu: bool = False, bias: bool = False) -> PackedLinear:
    """Return a column-parallel layer of 512 rows and 1024 columns without a weight."""
    part = LinearPart(
        name="layer", first_row=0, rows=slice(0, 512), columns=slice(0, 1024), shape=(512, 1024)
    )
    spec = LinearSpec(
        parts=(part,),
        rows=512,
        columns=1024,
        bias=bias,
        kind=LinearKind.COLUMN,
        swiglu=swiglu,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    scheme = Fp8Weights(scale_shape=ScaleShape.CHANNEL, activations=None, layout=Fp8Layout.HUGGING_FACE)
    return PackedLinear(spec, scheme)


@pytest.mark.parametrize(("codes", "bias"), [(Codes.UINT4, False), (Codes.UINT4, True), (Codes.E4M3, False)])
@pytest.mark.parametrize("swiglu", [False, True])
def test_layers_add_and_normalise_a_single_row_in_the_kernel(
    swiglu: bool, codes: Codes, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: set[object] = set()
    launched: list[tuple[object, ...]] = []
    monkeypatch.setattr(packed_small, "load_kernel", lambda *kernel: loaded.add(kernel[:-1]))
    monkeypatch.setattr(packed_small, "launch", lambda *call, **options: launched.append(call[-1]))
    monkeypatch.setattr(packed_small, "is_hopper_or_later", lambda device: True)
    method = make_method(swiglu=swiglu, bias=bias)
    method.bias = torch.ones(512, dtype=torch.bfloat16) if bias else None
    row_step, dtype = (1, torch.bfloat16) if codes is Codes.UINT4 else (128, torch.float32)
    weight = make_weight(codes, 512, 1024, row_step, 128, dtype=dtype)
    method._keep(pack_weight(weight, swiglu=swiglu and not bias))
    norm = SimpleNamespace(weight=torch.ones(1024, dtype=torch.bfloat16), epsilon=1e-6, fusible=True)
    silu, gelu = (SimpleNamespace(kind=kind) for kind in (Activation.SILU, Activation.GELU))
    activation = silu if swiglu else None
    x, residual = torch.zeros(1, 1024, dtype=torch.bfloat16), torch.zeros(1, 1024, dtype=torch.bfloat16)
    if swiglu and bias:
        assert method.apply_after_norm(norm, x, residual, activation) is None  # type: ignore[arg-type]
        return
    for added in (x, None):
        result = method.apply_after_norm(norm, added, residual, activation)  # type: ignore[arg-type]
        assert result is not None
        out, new_residual = result
        assert out.shape == (1, 256 if swiglu else 512)
        assert (new_residual is residual) == (added is None)
        names = (launched[-1][3], launched[-1][-6], launched[-1][-4])
        expected = (residual, None, None) if added is None else (x, residual, new_residual)
        assert all(tensor is other for tensor, other in zip(names, expected, strict=True))
    assert len(loaded) == 1 and loaded <= method.kernel_specs((1, 2, 8))
    refused = [
        (norm, torch.cat((x, x)), torch.cat((x, x)), activation),
        (SimpleNamespace(**{**vars(norm), "fusible": False}), x, residual, activation),
        (norm, x, residual, None if swiglu else silu),
        (norm, x, residual, gelu),
    ]
    assert all(method.apply_after_norm(*arguments) is None for arguments in refused)  # type: ignore[arg-type]
    assert len(launched) == 2


def test_small_batches_load_the_next_weight_into_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(packed_small, "load_kernel", lambda *kernel: None)
    monkeypatch.setattr(packed_small, "launch", lambda *call, **options: launched.append(call[-1]))
    monkeypatch.setattr(packed_small, "is_hopper_or_later", lambda device: True)
    monkeypatch.setattr(packed_method, "MAX_PREFETCHED_BYTES", 1 << 14)

    def prefetched(count: int, codes: Codes) -> tuple[object, ...]:
        first, second = make_method(), make_method()
        first.set_next(second)
        first._keep(pack_weight(make_weight(Codes.UINT4, 512, 1024, 1, 128, dtype=torch.bfloat16)))
        second._keep(pack_weight(make_weight(codes, 512, 1024, 1, 128, dtype=torch.bfloat16)))
        first.apply(torch.zeros(count, 1024, dtype=torch.bfloat16))
        assert second.packed is not None
        following, size = launched[-1][-2:]
        assert following is None or torch.equal(following, second.packed.values.view(-1)[: len(following)])
        assert following is None or following.data_ptr() == second.packed.values.data_ptr()
        return size, following is None

    assert prefetched(8, Codes.UINT4) == (1 << 14, False)
    assert prefetched(1, Codes.UINT4) == prefetched(8, Codes.INT8) == (0, True)
    monkeypatch.setattr(packed_method, "MAX_PREFETCHED_BYTES", 1 << 30)
    assert prefetched(2, Codes.UINT4) == (512 * 1024 // 2, False)


def test_rows_that_are_long_padded_or_reordered_are_not_normalised_in_the_kernel() -> None:
    packed = pack_weight(make_weight(Codes.UINT4, 128, 1024, 1, 128, dtype=torch.bfloat16))
    assert packed_small.supports_norm(packed)
    assert not packed_small.supports_norm(replace(packed, order=torch.arange(1024)))
    for columns in (1000, 8192):
        other = pack_weight(make_weight(Codes.INT8, 64, columns))
        assert not packed_small.supports_norm(other)
    norm = PreNorm(scale=torch.ones(1024), epsilon=1e-6)
    x = torch.zeros(2, 1024, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="2 rows of x cannot be normalised"):
        packed_small.packed_small_gemm(packed, x, norm=norm)
    split = SmallTileConfig(4, 1, 2, 8, 2, 2)
    with pytest.raises(ValueError, match="cannot be normalised"):
        packed_small.packed_small_gemm(packed, x[:1], norm=norm, config=split)


def test_measured_tilings_are_selected_for_one_row_of_their_shapes() -> None:
    for (codes, rows, columns, batch), config in TILE_CONFIGS.items():
        if codes is Codes.UINT4 and batch == 1:
            for zeros in (False, True):
                weight = make_format("int4", rows, columns, swiglu=False, zeros=zeros)
                assert select_tile_config(weight, 1) == config


@pytest.mark.parametrize(
    ("codes", "rows", "columns", "expected"),
    [
        (Codes.UINT4, 24576, 4096, 8),
        (Codes.UINT4, 1024, 65536, 1),
        (Codes.INT8, 4096, 4096, 4),
        (Codes.INT8, 24576, 4096, 0),
        (Codes.INT8, 128, 100, 0),
    ],
)
def test_the_largest_batch_is_that_at_which_the_kernel_was_fastest(
    codes: Codes, rows: int, columns: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_small, "is_hopper_or_later", lambda device: device.type == "meta")
    chunk = chunk_columns(codes)
    weight = PackedWeight(
        codes=codes,
        rows=rows,
        columns=columns,
        group_columns=columns,
        values=torch.empty((rows // 64, -(-columns // 64) * 64 // chunk, 4, 32, 16), device="meta").byte(),
        scales=torch.empty(rows, device="meta"),
        scale_layout=ScaleLayout.ROW,
        zeros=None,
        swiglu=False,
        order=None,
    )
    assert packed_small.max_batch(weight) == expected
    monkeypatch.setattr(packed_small, "is_hopper_or_later", lambda device: False)
    assert packed_small.max_batch(weight) == 0
