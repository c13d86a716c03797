"""The product of one row with a weight matrix, for decodes of a single request.

A warp (or several, for long rows) computes one output from weights that it has asked for before it waits for
the kernel ahead of it (programmatic dependent launch, CUDA programming guide 4.5): the weights depend on
nothing, so their way from memory overlaps with the end of what computes the input. NVRTC compiles the kernel
at start, for each length of a row.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch

log = logging.getLogger(__name__)

THREADS = 256
WARPS = THREADS // 32
LOADS = 16
"""16-byte loads that a thread has in flight at most."""
SOURCE = r"""
__device__ __forceinline__ float low(unsigned x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high(unsigned x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ float dot(unsigned a, unsigned b, float sum) {
    return fmaf(high(a), high(b), fmaf(low(a), low(b), sum));
}

// weight [rows, VECTORS * 8], x [VECTORS * 8] -> out [rows], all bfloat16, 16-byte aligned.
extern "C" __global__ void __launch_bounds__(256)
gemv(const uint4* weight, const uint4* x, unsigned short* out, int rows) {
    __shared__ float partial[8];
    asm volatile("griddepcontrol.launch_dependents;");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = blockIdx.x * (8 / SHARE) + warp / SHARE;
    const int first = warp % SHARE * 32 + lane;
    uint4 w[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int index = first + i * SHARE * 32;
        w[i] = make_uint4(0, 0, 0, 0);
        if (row < rows && index < VECTORS)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                : "=r"(w[i].x), "=r"(w[i].y), "=r"(w[i].z), "=r"(w[i].w)
                : "l"(weight + (size_t)row * VECTORS + index));
    }
    // Nothing that an earlier kernel writes is read before this, nor anything written.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    float sum = 0;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int index = first + i * SHARE * 32;
        if (index < VECTORS) {
            uint4 v;  // the wait has made it visible; the block's rows share it in the L1
            asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(x + index) : "memory");
            sum = dot(w[i].x, v.x, sum);
            sum = dot(w[i].y, v.y, sum);
            sum = dot(w[i].z, v.z, sum);
            sum = dot(w[i].w, v.w, sum);
        }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (SHARE > 1) {
        if (lane == 0) partial[warp] = sum;
        __syncthreads();
        sum = 0;
        for (int i = 0; i < SHARE; i++) sum += partial[warp / SHARE * SHARE + i];
    }
    if (row < rows && lane == 0 && warp % SHARE == 0) {
        unsigned short rounded;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(sum));
        out[row] = rounded;
    }
}
"""


class CompileError(RuntimeError):
    """NVRTC or the driver refused the kernel; the message says why."""


def checked(result: tuple[Any, ...], what: str) -> Any:
    """Return what a call of the CUDA bindings gives besides its status.

    Raises:
        CompileError: the status is not success.
    """
    if int(result[0]) != 0:
        raise CompileError(f"{what}: {result[0]}")
    return result[1] if len(result) == 2 else result[1:]


def row_share(columns: int) -> int:
    """Return how many warps compute one output together, so that none holds more than `LOADS` loads."""
    share = 1
    while share < WARPS and columns > 8 * 32 * share * LOADS:
        share *= 2
    return share


@functools.cache
def compiled(columns: int, device: int) -> Any:
    """Return the kernel (a CUfunction) for rows of so many columns.

    Raises:
        CompileError: it cannot be compiled here.
    """
    from cuda.bindings import driver, nvrtc

    major, minor = torch.cuda.get_device_capability(device)
    share = row_share(columns)
    loads = -(-columns // (8 * 32 * share))
    flags = (f"-arch=sm_{major}{minor}", f"-DVECTORS={columns // 8}", f"-DSHARE={share}", f"-DLOADS={loads}")
    program = checked(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"gemv.cu", 0, [], []), "gemv.cu")
    options = [flag.encode() for flag in flags]
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status[0]) != 0:
        text = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program), "gemv.cu")
        nvrtc.nvrtcGetProgramLog(program, text)
        raise CompileError(text.decode())
    code = b" " * checked(nvrtc.nvrtcGetCUBINSize(program), "gemv.cu")
    checked(nvrtc.nvrtcGetCUBIN(program, code), "gemv.cu")
    torch.cuda.current_stream(device)  # a context is there
    module = checked(driver.cuModuleLoadData(code), "loading gemv")
    return checked(driver.cuModuleGetFunction(module, b"gemv"), "loading gemv")


def serves(weight: torch.Tensor) -> bool:
    """Tell whether `gemv` can run with a weight, and compile it for that.

    False where the device or the precision is another, or (with a warning) where it cannot be compiled.
    """
    columns = weight.shape[1]
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16 or columns % 8:
        return False
    if torch.cuda.get_device_capability(weight.device)[0] < 9 or columns > 8 * 32 * WARPS * LOADS:
        return False
    try:
        compiled(columns, weight.device.index or 0)
    except (ImportError, CompileError) as error:
        log.warning("decodes of one request use general matrix products, which is slower: %s", error)
        return False
    return True


@functools.lru_cache(256)
def launch_config(rows: int, columns: int, stream: int) -> Any:
    """Return how a kernel is launched (a CUlaunchConfig): while the one ahead of it still runs."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    per_block = WARPS // row_share(columns)
    config.gridDimX, config.gridDimY, config.gridDimZ = -(-rows // per_block), 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
    config.hStream = stream
    config.attrs, config.numAttrs = [attribute], 1
    return config


def gemv(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [1, columns] times the transpose of weight [rows, columns], both contiguous: [1, rows]."""
    from cuda.bindings import driver

    rows, columns = weight.shape
    if out is None:
        out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    config = launch_config(rows, columns, stream)
    values = (weight.data_ptr(), x.data_ptr(), out.data_ptr(), rows)
    types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    function = compiled(columns, x.device.index or 0)
    checked(driver.cuLaunchKernelEx(config, function, (values, types), 0), "launching gemv")
    return out
