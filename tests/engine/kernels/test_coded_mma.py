# SPDX-License-Identifier: Apache-2.0
"""Small batches times quantized experts: layout of codes and inputs, tilings, and compiled kernels."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings", reason="this PyTorch comes without CUDA's bindings")
pytest.importorskip("triton", reason="this PyTorch comes without Triton")

from machine_code import disassemble

from mizzen.kernels import nvrtc
from mizzen.kernels.experts import coded_mma, few_mma
from mizzen.kernels.experts.coded_mma import MAX_PAIRS, CodedMmaTile, kernel_spec, supports
from mizzen.kernels.experts.few_mma import FewMmaTile
from mizzen.kernels.experts.gate import Gate
from mizzen.kernels.experts.matrices import ExpertMatrices
from mizzen.layers.experts.coded_kernel_plans import CODED_PLANS
from mizzen.layers.experts.kernel_plans import CodedMma, CodedWgmma, ExpertSizes, FewMma
from mizzen.layers.quantized.canonical import E2M1_VALUES, Codes
from mizzen.models.block import Activation

HOPPER = (9, 0)
MAX_SHARED_BYTES = 227 * 1024
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Order of inputs within each eight columns."""


def make_matrices(
    codes: Codes, rows: int, columns: int, *, experts: int = 4, **options: Any
) -> ExpertMatrices:
    """Return matrices without memory."""
    step, row_step = 32 if codes is Codes.E2M1 else 128, 128 if codes is Codes.E4M3 else 1
    dtype = torch.uint8 if codes is Codes.E2M1 else torch.bfloat16
    fields: dict[str, Any] = {"codes": codes, "rows": rows, "columns": columns, "zeros": None}
    fields |= {"row_step": row_step, "column_step": step} | options
    row_bytes = columns if codes is Codes.E4M3 else columns // 2
    shape = -(-experts * rows // fields["row_step"]), -(-columns // fields["column_step"])
    fields["values"] = torch.empty(experts * rows, row_bytes, dtype=torch.uint8, device="meta")
    return ExpertMatrices(**{"scales": torch.empty(shape, dtype=dtype, device="meta"), **fields})


SHAPES = {
    Codes.E2M1: (make_matrices(Codes.E2M1, 5760, 2880), make_matrices(Codes.E2M1, 2880, 2880)),
    Codes.UINT4: (make_matrices(Codes.UINT4, 1536, 2048), make_matrices(Codes.UINT4, 2048, 768)),
    Codes.E4M3: (make_matrices(Codes.E4M3, 1536, 2048), make_matrices(Codes.E4M3, 2048, 768)),
}
"""Gate and up, and down, of gpt-oss-20b and Qwen3-30B-A3B."""
BY_ROW = tuple(
    make_matrices(Codes.E4M3, each.rows, each.columns, row_step=1, column_step=each.columns)
    for each in SHAPES[Codes.E4M3]
)
TILES = [
    (format_.codes, tiles)
    for format_, plan in CODED_PLANS.items()
    for _, tiles in plan.coded_mma
    if not isinstance(tiles, CodedWgmma)
]


def decode_pairs(words: np.ndarray) -> np.ndarray:
    """Return the pairs of words of E2M1 codes, uint32 [words, 4], by the kernel's instructions."""
    pairs = []
    for i in range(4):
        source, place = (words, i) if i < 2 else (words >> 8, i - 2)
        code = source & np.uint32(0x000F000F << (4 * place))
        pairs.append((code * np.uint32(0x104 if place else 0x1040)) & np.uint32(0x81C081C0))
    return np.stack(pairs, 1)


def test_pairs_of_e2m1_are_values_times_a_power_of_two() -> None:
    words = np.random.default_rng(1).integers(1 << 32, size=999, dtype=np.uint32)
    halves = decode_pairs(words)[:, :, None] >> np.array([0, 16], np.uint32) & np.uint32(0xFFFF)
    found = (halves << np.uint32(16)).view(np.float32).astype(np.float64) * 2.0**126
    values = np.array([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    codes = words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)
    expected = np.stack([values[codes[:, :4]], values[codes[:, 4:]]], 2)
    assert np.array_equal(found, expected)


def test_operands_of_an_mma_have_the_same_columns_and_all_columns_are_multiplied() -> None:
    """Step q of lane t multiplies word q of the 16 bytes from column 32 t on, in two products."""
    seen: list[int] = []
    for t in range(4):
        for q in range(4):
            stored = [32 * t + 8 * q + column for column in ORDER]
            for pair in range(4):
                codes = [32 * t + 8 * q + pair, 32 * t + 8 * q + pair + 4]
                assert stored[2 * pair : 2 * pair + 2] == codes
                seen += codes
    assert sorted(seen) == list(range(128))


def test_pairs_of_e4m3_are_values_times_a_power_of_two() -> None:
    words = np.random.default_rng(1).integers(1 << 32, size=999, dtype=np.uint32)
    codes = words[:, None] >> np.arange(0, 32, 8, dtype=np.uint32) & np.uint32(255)
    signed = np.where(codes & 128, codes | 0xFF00, codes).astype(np.uint32)
    pairs = (signed[:, ::2] | signed[:, 1::2] << np.uint32(16)) << np.uint32(4) & np.uint32(0x87F087F0)
    halves = pairs[:, :, None] >> np.array([0, 16], np.uint32) & np.uint32(0xFFFF)
    found = (halves.reshape(-1, 4) << np.uint32(16)).view(np.float32).astype(np.float64) * 2.0**120
    expected = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn).double().numpy()
    valid = (codes & 127) != 127
    assert np.array_equal(found[valid], expected[valid])


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_lanes_that_read_e4m3_do_not_conflict_and_get_all_columns_of_their_row(chunk: int) -> None:
    """Halves of 64 bytes trade places in odd rows; see `load_codes`."""
    line, pieces = chunk * 128, chunk * 8
    stored = {}
    for row in range(16):
        for piece in range(pieces):
            stored[row * line + (piece ^ row % 2 * 4) * 16] = row, piece
    for i in range(chunk):
        for half in range(2):
            for first in range(0, 32, 8):
                places = []
                for lane in range(first, first + 8):
                    g, t = divmod(lane, 4)
                    places.append(g * line + t * 16 + i * 128 + g % 2 * 64 + half * (-64 if g % 2 else 64))
                    assert stored[places[-1]] == (g, i * 8 + half * 4 + t)
                assert len({place % 128 for place in places}) == 8


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_lanes_that_load_together_do_not_conflict(chunk: int) -> None:
    """Each eighth of 128 bytes is read by one of eight consecutive lanes."""
    pitch, line = chunk * 256 + 64, chunk * 64
    for first in range(0, 32, 8):
        lanes = [divmod(lane, 4) for lane in range(first, first + 8)]
        for i in range(chunk):
            inputs = {(g * pitch + i * 256 + t * 16) % 128 for g, t in lanes}
            place = [0 if chunk == 1 else (i ^ g % 2) * 64 for g, _ in lanes]
            codes = {(g * line + at + t * 16) % 128 for at, (g, t) in zip(place, lanes, strict=True)}
            assert len(inputs) == len(codes) == 8


@pytest.mark.parametrize(("codes", "tiles"), TILES, ids=str)
def test_tilings_of_plans_fit_the_gpu_and_divide_the_outputs(codes: Codes, tiles: CodedMma | FewMma) -> None:
    if isinstance(tiles, FewMma):
        gate_up, down = SHAPES[codes]
        assert tiles.gate_up.fits(gate_up, 1) and tiles.down.fits(down, 8)
        assert max(tiles.gate_up.part, tiles.down.part) <= few_mma.MAX_PART
        return
    for matrices, tile, gated in zip(SHAPES[codes], (tiles.gate_up, tiles.down), (True, False), strict=True):
        assert tile.shared_bytes(matrices) <= MAX_SHARED_BYTES
        assert tile.stages >= 2 and tile.n_tiles in (1, 2, 3, 4, 6, 8)
        assert tile.m_warps * tile.m_tiles >= (2 if gated else 1)
        assert (32 if gated else 64) % (tile.m_tiles * (8 if gated else 16)) == 0


def check_code(spec: nvrtc.KernelSpec, folder: Path) -> None:
    cubin = nvrtc.compile_cubin(*spec, HOPPER)
    assert re.search(r"STACK:0 ", disassemble(cubin, folder, "--dump-resource-usage"))
    code = disassemble(cubin, folder, "--dump-sass")
    assert "HMMA.16816.F32.BF16" in code and "LDGSTS" in code
    assert not re.search(r"I2F|F2F\.", code)


@pytest.mark.parametrize("gated", [True, False], ids=["gate-up", "down"])
@pytest.mark.parametrize("shapes", [*SHAPES.values(), BY_ROW], ids=[*SHAPES, "by-row"])
def test_kernels_compile_without_spills(
    shapes: tuple[ExpertMatrices, ExpertMatrices], gated: bool, tmp_path: Path
) -> None:
    matrices, gate = shapes[0 if gated else 1], Gate(Activation.CLAMPED_SWIGLU, 7.0) if gated else None
    check_code(kernel_spec(matrices, CodedMmaTile(1, 2, 4, 1, 2, 3, 4), gate, 4, biased=True), tmp_path)


@pytest.mark.parametrize("gated", [True, False], ids=["gate-up", "down"])
@pytest.mark.parametrize("shapes", [SHAPES[Codes.E4M3], BY_ROW], ids=["by-block", "by-row"])
def test_kernels_of_few_tokens_compile_without_spills(
    shapes: tuple[ExpertMatrices, ExpertMatrices], gated: bool, tmp_path: Path
) -> None:
    gate = Gate(Activation.SILU) if gated else None
    tile = FewMmaTile(6 if gated else 1, 8, 4, 1)
    spec = few_mma.kernel_spec(shapes[0 if gated else 1], tile, gate, 8, biased=True, adds=not gated)
    check_code(spec, tmp_path)


def test_a_block_goes_through_as_many_tiles_of_rows_as_fill_all_blocks() -> None:
    tile, down = CodedMmaTile(1, 2, 4, 1, 1, 2, 1, row_tiles=4), SHAPES[Codes.E4M3][1]
    for rows, row_tiles in ((2048, 4), (1152, 3), (1280, 2), (1408, 1), (1472, 1)):
        fitted = tile.fit(replace(down, rows=rows), has_gate=False)
        assert fitted.row_tiles == row_tiles
        assert fitted.outputs(has_gate=False) == 128 * row_tiles
    for other in (replace(tile, k_split=2), replace(tile, row_tiles=1)):
        assert other.fit(down, has_gate=False).row_tiles == 1
    assert tile.fit(SHAPES[Codes.E4M3][0], has_gate=True).row_tiles == 1
    assert tile.fit(SHAPES[Codes.UINT4][1], has_gate=False).row_tiles == 1


def test_tilings_of_few_tokens_depend_on_the_sizes_of_experts() -> None:
    tile = FewMmaTile(2, 8, 4, 1)
    for columns, k_split in ((768, 1), (1024, 1), (1040, 2), (2048, 2), (14336, 14)):
        matrices = make_matrices(Codes.E4M3, 128, columns)
        assert tile.k_split(matrices) == k_split
        assert tile.warps(matrices, 3) == 6 * k_split
        assert tile.fits(matrices, 1) is (k_split < 14)
    assert tile.shared_bytes(make_matrices(Codes.E4M3, 128, 384), 3) == 6 * 3 * 2048
    assert tile.outputs(has_gate=True) == 16 and tile.outputs(has_gate=False) == 32


def test_other_weights_are_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not supports(make_matrices(Codes.E2M1, 64, 64), has_gate=True)
    monkeypatch.setattr(coded_mma, "has_wgmma", lambda device: True)
    assert supports(make_matrices(Codes.E2M1, 64, 64), has_gate=True)
    assert supports(make_matrices(Codes.UINT4, 64, 256), has_gate=False)
    assert supports(make_matrices(Codes.E4M3, 256, 144), has_gate=True)
    assert few_mma.supports(make_matrices(Codes.E4M3, 256, 144), has_gate=True)
    assert supports(make_matrices(Codes.E4M3, 64, 144, row_step=1, column_step=144), has_gate=True)
    assert not few_mma.supports(make_matrices(Codes.UINT4, 64, 256), has_gate=False)
    for matrices in (
        make_matrices(Codes.E2M1, 32, 64),
        make_matrices(Codes.E2M1, 64, 80),
        make_matrices(Codes.E2M1, 64, 64, column_step=16),
        make_matrices(Codes.UINT4, 64, 256, column_step=64),
        make_matrices(Codes.E4M3, 64, 128),
        make_matrices(Codes.E4M3, 256, 136),
        make_matrices(Codes.E4M3, 256, 128, column_step=64),
        make_matrices(Codes.E4M3, 256, 128, scales=torch.empty(8, 1, dtype=torch.uint8, device="meta")),
        make_matrices(Codes.UINT4, 64, 256, orders=SimpleNamespace()),
        make_matrices(Codes.E2M1, 64, 64, experts=1025),
    ):
        assert not supports(matrices, has_gate=True)


def test_plans_use_the_kernel_for_small_batches_only() -> None:
    sizes = ExpertSizes(32, 2880, 2880)
    plan = next(plan for format_, plan in CODED_PLANS.items() if format_.codes is Codes.E2M1)
    for tokens in (1, 2, 8, 32, 128):
        assert isinstance(plan.variant(tokens, 4, sizes), CodedMma | CodedWgmma)
    for tokens in (MAX_PAIRS // 4 + 1, 8192):
        assert not isinstance(plan.variant(tokens, 4, sizes), CodedMma | CodedWgmma)
    assert not isinstance(
        plan.variant(8, MAX_PAIRS // 8 + 1, ExpertSizes(1 << 20, 64, 64)), CodedMma | CodedWgmma
    )
