"""What kernels share that multiply on Hopper's tensor cores by groups of warps, fed by its copy engine."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mizzen.kernels.nvrtc import check_status, read_source

COLUMNS = 64
"""Columns of a stage."""
SHARED_BYTES = 227 * 1024
"""Shared memory of a block at most."""
ALIGNMENT = 1024
"""Bytes to which a stage is aligned."""


def wgmma(name: str, batch: int) -> str:
    """Return the C++ of the tensor cores' instruction for 64 rows times `batch`, which adds or sets."""
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


@functools.cache
def kernel_source(name: str, batch: int) -> str:
    """Return the whole source of a kernel whose blocks multiply so many rows of x at a time."""
    half = wgmma("wgmma_half", batch // 2) if batch % 16 == 0 else ""
    instructions = "typedef unsigned long long u64;\n" + wgmma("wgmma", batch) + half
    return instructions + read_source("gemm/hopper") + read_source(f"gemm/{name}")


@functools.lru_cache(8192)
def make_tensor_map(address: int, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> Any:
    """Describe bfloat16 numbers to the copy engine.

    Args:
        address: Where they are.
        dims: Sizes, the innermost first.
        strides: In elements, without the innermost, which is 1.
        box: Sizes of what is fetched at a time.
    """
    from cuda.bindings import driver

    return check_status(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(dims),
            address,
            [driver.cuuint64_t(size) for size in dims],
            [driver.cuuint64_t(2 * stride) for stride in strides],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1)] * len(dims),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "describing a tensor to the copy engine",
    )


def make_weight_map(weight: torch.Tensor, height: int, *, gate: bool) -> Any:
    """Describe weights [rows, columns], of which `height` rows are fetched at a time.

    With `gate` these are eight gates and the eight rows beside them in turn.
    """
    rows, columns = weight.shape
    if not gate:
        return make_tensor_map(weight.data_ptr(), (columns, rows), (columns,), (COLUMNS, height))
    half = rows // 2
    dims, strides = (columns, 8, 2, half // 8), (columns, half * columns, 8 * columns)
    return make_tensor_map(weight.data_ptr(), dims, strides, (COLUMNS, 8, 2, height // 16))
