# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources compile without a GPU, and their machine code has the properties that make them fast."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="this PyTorch comes without CUDA's bindings")
pytest.importorskip("triton", reason="this PyTorch comes without Triton")

from machine_code import disassemble

from mizzen.kernels import nvrtc
from mizzen.kernels.attention import flash_decode_mma
from mizzen.kernels.comm import allreduce_rmsnorm, peer_broadcast
from mizzen.kernels.gemm import gate_up_swiglu, gemv, hopper, small_m, swap_ab
from mizzen.kernels.sampling import top_k_top_p

HOPPER, BLACKWELL = (9, 0), (10, 0)
Definitions = tuple[tuple[str, int], ...]


@pytest.fixture
def dump(tmp_path: Path) -> Callable[[bytes, str], str]:
    """Return a function that runs the disassembler with one option on a cubin, and returns its output."""
    return lambda cubin, option: disassemble(cubin, tmp_path, option)


def small_m_definitions(columns: int, swiglu: int, bias: int = 0) -> Definitions:
    tiling = (("COLUMNS", columns), ("ROW_GROUPS", 2), ("TILES", 2), ("LOADS", 4))
    return (*tiling, ("SWIGLU", swiglu), ("BIAS", bias))


def attention_definitions(cache: torch.dtype, fused_qkv: bool, sinks: bool = False) -> Definitions:
    return flash_decode_mma.compile_definitions(
        128, 4, 8, 16, None, 4, cache, norm=True, fused_qkv=fused_qkv, sinks=sinks
    )


def gemv_definitions(
    columns: int, *, swiglu: bool = False, norm: bool = False, add: bool = False, bias: bool = False
) -> Definitions:
    return gemv.compile_definitions(columns, swiglu=swiglu, norm=norm, add=add, bias=bias)


@pytest.mark.parametrize(
    ("source", "name", "defines", "loads_before_wait"),
    [
        (gemv.SOURCE, "gemv", gemv_definitions(1024), 4),
        (gemv.SOURCE, "gemv", gemv_definitions(1024, swiglu=True, norm=True, add=True), 9),
        (gemv.SOURCE, "gemv", gemv_definitions(1024, norm=True, add=True, bias=True), 5),
        (gemv.SOURCE, "gemv", gemv_definitions(2880, bias=True), 12),
        (gemv.SOURCE, "gemv", gemv_definitions(25600), 13),
        (gemv.SOURCE, "gemv", gemv_definitions(gemv.max_columns(False)), 16),
        (gemv.SOURCE, "gemv", gemv_definitions(gemv.max_columns(True), swiglu=True), 16),
        (small_m.SOURCE, "small_m", small_m_definitions(1024, 0), 8),
        (small_m.SOURCE, "small_m", small_m_definitions(1024, 0, bias=1), 8),
        (small_m.SOURCE, "small_m", small_m_definitions(4096, 1), 8),
        (flash_decode_mma.SOURCE, "flash_decode_mma", attention_definitions(torch.bfloat16, True), 16),
        (flash_decode_mma.SOURCE, "flash_decode_mma", attention_definitions(torch.bfloat16, True, True), 16),
        (flash_decode_mma.SOURCE, "flash_decode_mma", attention_definitions(torch.float8_e4m3fn, True), 8),
        (
            allreduce_rmsnorm.SOURCE,
            "allreduce_rmsnorm",
            allreduce_rmsnorm.compile_definitions(4096, 2, 32, "push"),
            1,
        ),
        (
            allreduce_rmsnorm.SOURCE,
            "allreduce_rmsnorm",
            allreduce_rmsnorm.compile_definitions(5120, 8, 32, "read"),
            1,
        ),
        (
            allreduce_rmsnorm.SOURCE,
            "allreduce_rmsnorm",
            allreduce_rmsnorm.compile_definitions(5120, 4, 32, "two_shot"),
            1,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_loads_are_issued_before_the_pdl_wait(
    source: str,
    name: str,
    defines: Definitions,
    loads_before_wait: int,
    dump: Callable[[bytes, str], str],
) -> None:
    instructions = dump(nvrtc.compile_cubin(source, name, defines, HOPPER), "--dump-sass")
    loads_and_wait = re.findall(r"\b(LDG\.E\S*\.128\S*|ACQBULK)", instructions)
    # The compiler may move loads of the read-only path past the wait, and then nothing overlaps.
    assert loads_and_wait.index("ACQBULK") == loads_before_wait


@pytest.mark.parametrize("swiglu", [False, True])
def test_gemv_keeps_rows_of_any_supported_length_in_flight(swiglu: bool) -> None:
    """Each block issues the loads of all its elements before it accumulates the first element."""
    for columns in range(8, gemv.max_columns(swiglu) + 8, 8):
        defines = dict(gemv_definitions(columns, swiglu=swiglu))
        assert defines["LOADS"] * defines["WARPS_PER_ROW"] * 32 >= defines["VECTORS"] == columns // 8
        assert defines["LOADS"] * (1 + swiglu) <= gemv.LOADS


@pytest.mark.parametrize("batch", [16, 48, 208, 256])
@pytest.mark.parametrize(
    "config",
    [
        swap_ab.TileConfig(64, 2, 1),
        swap_ab.TileConfig(128, 3, 2),
        swap_ab.TileConfig(128, 4, 2),
        swap_ab.TileConfig(192, 1, 2),
    ],
    ids=str,
)
def test_swap_ab_gemms_use_wgmma_and_tma_without_spills(
    config: swap_ab.TileConfig, batch: int, dump: Callable[[bytes, str], str]
) -> None:
    assert config.supports(6144, 4096, batch)
    defines = swap_ab.compile_definitions(
        batch, config, config.stages(batch, 16), swiglu=batch == 48, bias=batch == 256
    )
    cubin = nvrtc.compile_cubin(hopper.kernel_source("swap_ab", batch), "swap_ab", defines, HOPPER)
    instructions = dump(cubin, "--dump-sass")
    assert f"HGMMA.64x{batch}x16" in instructions and "UTMALDG" in instructions
    # A fence in the main loop would cost more than the GEMM; so would spilled accumulators.
    loop = instructions[: instructions.rindex("HGMMA")]
    assert loop[instructions.index("HGMMA") :].count("MEMBAR") == 0
    assert "STACK:0 " in dump(cubin, "--dump-resource-usage")


def test_gate_up_swiglu_uses_wgmma_and_tma_without_spills(dump: Callable[[bytes, str], str]) -> None:
    cubin = nvrtc.compile_cubin(*gate_up_swiglu.kernel_spec(), HOPPER)
    instructions = dump(cubin, "--dump-sass")
    assert all(name in instructions for name in ("HGMMA.64x128x16", "UTMALDG.4D", "UTMALDG.2D.MULTICAST"))
    loop = instructions[instructions.index("HGMMA") : instructions.rindex("HGMMA")]
    assert loop.count("MEMBAR") == 0
    assert "STACK:0 " in dump(cubin, "--dump-resource-usage")
    assert gate_up_swiglu.SHARED_BYTES + 2 * gate_up_swiglu.STAGES * 8 <= hopper.MAX_SHARED_BYTES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [1, 32003, 151936])
def test_top_k_top_p_compiles_without_spills(
    vocab: int, dtype: torch.dtype, dump: Callable[[bytes, str], str]
) -> None:
    defines = top_k_top_p.compile_definitions(vocab, dtype)
    usage = dump(
        nvrtc.compile_cubin(top_k_top_p.SOURCE, "top_k_top_p", defines, HOPPER), "--dump-resource-usage"
    )
    (stack,) = re.findall(r"STACK:(\d+) ", usage)
    assert int(stack) <= (0 if vocab % top_k_top_p.TOKENS_PER_LOAD == 0 else 32)


def test_only_wgmma_kernels_are_limited_to_hopper() -> None:
    batch_and_config = swap_ab.pad_batch(6144, 4096, 40)
    assert batch_and_config is not None
    with pytest.raises(nvrtc.CompileError, match="not supported"):
        nvrtc.compile_cubin(
            *swap_ab.kernel_spec(4096, *batch_and_config, swiglu=False, defer_pdl=True), BLACKWELL
        )
    for source, name, defines in (
        (gemv.SOURCE, "gemv", gemv_definitions(1024, swiglu=True, norm=True, add=True)),
        (small_m.SOURCE, "small_m", small_m_definitions(4096, 1)),
        (flash_decode_mma.SOURCE, "flash_decode_mma", attention_definitions(torch.float8_e4m3fn, True)),
        (top_k_top_p.SOURCE, "top_k_top_p", top_k_top_p.compile_definitions(151936, torch.bfloat16)),
        (
            allreduce_rmsnorm.SOURCE,
            "allreduce_rmsnorm",
            allreduce_rmsnorm.compile_definitions(4096, 2, 32, "push"),
        ),
        (peer_broadcast.SOURCE, "broadcast_tokens", peer_broadcast.compile_definitions(512, 4, 256)),
    ):
        assert nvrtc.compile_cubin(source, name, defines, BLACKWELL)


@pytest.mark.parametrize("name", ["broadcast_tokens", "lookup_rows", "wait_for_writes"])
def test_peer_kernels_compile(name: str) -> None:
    defines = peer_broadcast.compile_definitions(512, 4, 256)
    assert nvrtc.compile_cubin(peer_broadcast.SOURCE, name, defines, HOPPER)


def test_compile_errors_contain_the_compilers_message() -> None:
    with pytest.raises(nvrtc.CompileError, match="nonsense"):
        nvrtc.compile_cubin("nonsense", "wrong", (), HOPPER)
