# SPDX-License-Identifier: Apache-2.0
"""Hopper building blocks of the wgmma GEMMs: instruction sources, pipeline sizes and TMA descriptors."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mizzen.kernels.nvrtc import check_status, read_source

ROW_BYTES = 128
"""Bytes of a row of an operand in a pipeline stage: the width of the swizzle."""
STAGE_COLUMNS = ROW_BYTES // 2
"""Number of bfloat16 columns (of the inner dimension) per pipeline stage."""
MAX_SHARED_BYTES = 227 * 1024
"""Maximum shared memory of a block in bytes."""
ALIGNMENT = 1024
"""Alignment of a pipeline stage in bytes."""


def wgmma_source(name: str, batch: int) -> str:
    """Return the source of a C++ function `name` that multiplies 64 weight rows by `batch` rows of x.

    The function runs one wgmma instruction, which adds the product to the accumulators `d`. If the
    function's parameter `add` is 0, the instruction overwrites the accumulators instead.
    """
    count = batch // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void {name}(float* d, u64 a, u64 b, int add) {{\n"
        f'    asm volatile("{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{count + 2}, 0;\\n"\n'
        f'        "wgmma.mma_async.sync.aligned.m64n{batch}k16.f32.bf16.bf16 "\n'
        f'        "{{{registers}}}, %{count}, %{count + 1}, add, 1, 1, 0, 0;\\n}}"\n'
        f'        : {outputs} : "l"(a), "l"(b), "r"(add));\n}}\n'
    )


def register_wgmma_source(batch: int, fragments: int) -> str:
    """Return the source of C++ functions for wgmma with weights (operand A) in registers.

    `wgmma_registers(d, a, b, add)` multiplies 64 weight rows by `batch` rows of x, as `wgmma_source`
    describes; `a` is the fragment of a k-step, four registers. `wait_for_sums(d)` waits for all wgmma groups,
    whose accumulators are `d`; `fence_fragments(a)` orders the writes of `fragments` fragments before the
    following wgmma instructions. The compiler moves no access of these registers across the two.
    """
    count = batch // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    left = ", ".join(f"%{count + i}" for i in range(4))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    written = ", ".join(f'"+r"(a[{i}])' for i in range(4 * fragments))
    return (
        "__device__ __forceinline__ void wgmma_registers(float* d, const unsigned* a, u64 b, int add) {\n"
        f'    asm volatile("{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{count + 5}, 0;\\n"\n'
        f'        "wgmma.mma_async.sync.aligned.m64n{batch}k16.f32.bf16.bf16 "\n'
        f'        "{{{registers}}}, {{{left}}}, %{count + 4}, add, 1, 1, 0;\\n}}"\n'
        f'        : {sums} : {inputs}, "l"(b), "r"(add));\n}}\n'
        "__device__ __forceinline__ void wait_for_sums(float* d) {\n"
        f'    asm volatile("wgmma.wait_group.sync.aligned 0;" : {sums} :: "memory");\n}}\n'
        "__device__ __forceinline__ void fence_fragments(unsigned* a) {\n"
        f'    asm volatile("wgmma.fence.sync.aligned;" : {written} :: "memory");\n}}\n'
    )


def register_wgmma_sources(batches: tuple[int, ...], fragments: int) -> str:
    """Return the source of the functions of `register_wgmma_source` for several sizes of batches.

    Accumulators are references to arrays, so that their size selects the function of `wgmma_registers` and
    `wait_for_sums`.
    """
    texts = []
    for batch in batches:
        text = register_wgmma_source(batch, fragments).replace("float* d", f"float (&d)[{batch // 2}]")
        start = text.index("__device__ __forceinline__ void fence_fragments")
        texts = [*texts, text[:start]] if batch != batches[-1] else [*texts, text]
    return "".join(texts)


@functools.cache
def kernel_source(name: str, batch: int) -> str:
    """Return the complete source of the kernel `name`, whose blocks multiply `batch` rows of x at a time."""
    half = wgmma_source("wgmma_half", batch // 2) if batch % 16 == 0 else ""
    instructions = "typedef unsigned long long u64;\n" + wgmma_source("wgmma", batch) + half
    return instructions + read_source("bf16") + read_source("gemm/hopper") + read_source(f"gemm/{name}")


@functools.lru_cache(8192)
def make_tensor_map(
    address: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    element_bytes: int = 2,
) -> Any:
    """Make the TMA descriptor (CUtensorMap) of a tensor of bfloat16 or of 8-bit elements.

    Args:
        address: Device address of the tensor.
        dims: Sizes of the tensor's dimensions, innermost first.
        strides: Strides of all dimensions but the innermost, in elements; the innermost has stride 1.
        box: Sizes of the part that one TMA load copies, innermost first.
        element_bytes: 2 for bfloat16, 1 for elements of 8 bits.

    Raises:
        CompileError: the driver rejected the descriptor.
    """
    from cuda.bindings import driver

    return check_status(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
            if element_bytes == 2
            else driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(dims),
            address,
            [driver.cuuint64_t(size) for size in dims],
            [driver.cuuint64_t(element_bytes * stride) for stride in strides],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1)] * len(dims),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "making a TMA descriptor",
    )


def make_weight_map(weight: torch.Tensor, tile_rows: int, *, swiglu: bool) -> Any:
    """Make the TMA descriptor of a weight [rows, columns], for loads of 128 bytes of `tile_rows` rows.

    The weight is bfloat16 or has elements of 8 bits. With `swiglu`, each load alternates eight gate rows with
    the corresponding eight up rows.
    """
    (rows, columns), size = weight.shape, weight.element_size()
    stage = ROW_BYTES // size
    if not swiglu:
        return make_tensor_map(weight.data_ptr(), (columns, rows), (columns,), (stage, tile_rows), size)
    half = rows // 2
    dims, strides = (columns, 8, 2, half // 8), (columns, half * columns, 8 * columns)
    return make_tensor_map(weight.data_ptr(), dims, strides, (stage, 8, 2, tile_rows // 16), size)
