"""The product of one row with a weight matrix, for decodes of a single request, with what surrounds it.

A warp (or several, for long rows) computes one output from weights that it has asked for before it waits for
the kernel ahead of it (programmatic dependent launch, CUDA programming guide 4.5): the weights depend on
nothing, so their way from memory overlaps with the end of what computes the input. On request the input is
added to the residual stream and normalised first (RMSNorm), by every block for itself, and the outputs are
gates and what they multiply (SwiGLU), whose products alone are stored. NVRTC compiles the kernel at start,
for each length of a row.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from mizzen.kernels.nvrtc import CompileError, compiled, launch

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
__device__ __forceinline__ unsigned packed(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ unsigned sum_of(unsigned a, unsigned b) {
    return packed(low(a) + low(b), high(a) + high(b));
}
__device__ __forceinline__ unsigned scaled(unsigned x, float by, unsigned scale) {
    return packed(low(x) * by * low(scale), high(x) * by * high(scale));
}
__device__ __forceinline__ float square(unsigned x) { return fmaf(high(x), high(x), low(x) * low(x)); }
// Volatile, and not through the read-only path: the compiler may move neither behind the wait.
__device__ __forceinline__ uint4 fixed_at(const uint4* at) {
    uint4 w;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(at) : "memory");
    return w;
}
__device__ __forceinline__ uint4 input_at(const uint4* at) {
    uint4 v;  // the wait has made it visible; the block's rows share it in the L1
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ float over_warp(float sum) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    return sum;
}

#define PER_THREAD ((VECTORS + 255) / 256)

// weight [rows * (1 + GATE), VECTORS * 8], x [VECTORS * 8] -> out [rows], all bfloat16, 16-byte aligned.
// With NORM, x (with ADD, x + before, which goes to `after`) is normalised and scaled first.
extern "C" __global__ void __launch_bounds__(256)
gemv(const uint4* weight, const uint4* x, unsigned short* out, int rows,
     const uint4* before, uint4* after, const uint4* scale, float epsilon) {
    __shared__ float partial[(1 + GATE) * 8];
    asm volatile("griddepcontrol.launch_dependents;");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = blockIdx.x * (8 / SHARE) + warp / SHARE;
    const int first = warp % SHARE * 32 + lane;
    uint4 w[1 + GATE][LOADS];
#pragma unroll
    for (int half = 0; half <= GATE; half++)
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int index = first + i * SHARE * 32;
            w[half][i] = make_uint4(0, 0, 0, 0);
            if (row < rows && index < VECTORS)
                w[half][i] = fixed_at(weight + (size_t)(row + half * rows) * VECTORS + index);
        }
#if NORM
    __shared__ uint4 normed[VECTORS];
    __shared__ float squares[8];
    uint4 scales[PER_THREAD], h[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int index = threadIdx.x + i * 256;
        scales[i] = make_uint4(0, 0, 0, 0);
        if (index < VECTORS) scales[i] = fixed_at(scale + index);
    }
#endif
    // Nothing that an earlier kernel writes is read before this, nor anything written.
    asm volatile("griddepcontrol.wait;" ::: "memory");
#if NORM
    float total = 0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int index = threadIdx.x + i * 256;
        h[i] = make_uint4(0, 0, 0, 0);
        if (index < VECTORS) {
            h[i] = input_at(x + index);
#if ADD
            const uint4 b = input_at(before + index);
            h[i].x = sum_of(h[i].x, b.x), h[i].y = sum_of(h[i].y, b.y);
            h[i].z = sum_of(h[i].z, b.z), h[i].w = sum_of(h[i].w, b.w);
            if (blockIdx.x == 0) after[index] = h[i];
#endif
        }
        total += square(h[i].x) + square(h[i].y) + square(h[i].z) + square(h[i].w);
    }
    total = over_warp(total);
    if (lane == 0) squares[warp] = total;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) total += squares[i];
    const float by = rsqrtf(total / (VECTORS * 8) + epsilon);
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int index = threadIdx.x + i * 256;
        if (index < VECTORS)
            normed[index] = make_uint4(scaled(h[i].x, by, scales[i].x), scaled(h[i].y, by, scales[i].y),
                scaled(h[i].z, by, scales[i].z), scaled(h[i].w, by, scales[i].w));
    }
    __syncthreads();
#endif
    float sums[1 + GATE] = {};
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int index = first + i * SHARE * 32;
        if (index < VECTORS) {
#if NORM
            const uint4 v = normed[index];
#else
            const uint4 v = input_at(x + index);
#endif
#pragma unroll
            for (int half = 0; half <= GATE; half++) {
                float sum = dot(w[half][i].x, v.x, sums[half]);
                sum = dot(w[half][i].y, v.y, sum);
                sum = dot(w[half][i].z, v.z, sum);
                sums[half] = dot(w[half][i].w, v.w, sum);
            }
        }
    }
#pragma unroll
    for (int half = 0; half <= GATE; half++) sums[half] = over_warp(sums[half]);
    if (SHARE > 1) {
        if (lane == 0)
            for (int half = 0; half <= GATE; half++) partial[half * 8 + warp] = sums[half];
        __syncthreads();
        for (int half = 0; half <= GATE; half++) {
            sums[half] = 0;
            for (int i = 0; i < SHARE; i++) sums[half] += partial[half * 8 + warp / SHARE * SHARE + i];
        }
    }
    if (row < rows && lane == 0 && warp % SHARE == 0) {
        float sum = sums[0];
#if GATE
        const unsigned rounded = packed(sums[0], sums[1]);
        sum = low(rounded) / (1 + __expf(-low(rounded))) * high(rounded);
#endif
        out[row] = (unsigned short)packed(sum, 0.0f);
    }
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """What happens to the input first."""

    scale: torch.Tensor
    """[columns], of the RMSNorm."""
    epsilon: float
    residual: torch.Tensor | None = None
    """[1, columns], added to the input before the norm."""


def row_share(columns: int, loads: int = LOADS) -> int:
    """Return how many warps compute one output together, so that none holds more than `loads` loads of it."""
    share = 1
    while share < WARPS and columns > 8 * 32 * share * loads:
        share *= 2
    return share


def share_of(columns: int, gate: bool) -> int:
    """Return how many warps compute one output together."""
    return row_share(columns, LOADS // 2 if gate else LOADS)


def definitions(columns: int, *, gate: bool, norm: bool, add: bool) -> tuple[tuple[str, int], ...]:
    """Return what the kernel is compiled with."""
    share = share_of(columns, gate)
    loads = -(-columns // (8 * 32 * share))
    sizes = (("VECTORS", columns // 8), ("SHARE", share), ("LOADS", loads))
    return (*sizes, ("GATE", int(gate)), ("NORM", int(norm)), ("ADD", int(add)))


def serves(weight: torch.Tensor) -> bool:
    """Tell whether `gemv` can run with a weight, and compile it for that.

    False where the device or the precision is another, or (with a warning) where it cannot be compiled.
    """
    columns = weight.shape[1]
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16 or columns % 8:
        return False
    if torch.cuda.get_device_capability(weight.device)[0] < 9 or columns > 8 * 32 * WARPS * LOADS // 2:
        return False
    try:
        compiled(
            SOURCE, "gemv", definitions(columns, gate=False, norm=False, add=False), weight.device.index or 0
        )
    except (ImportError, CompileError) as error:
        log.warning("decodes of one request use general matrix products, which is slower: %s", error)
        return False
    return True


def gemv(
    weight: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    gate: bool = False,
    norm: Norm | None = None,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x [1, columns] times the transpose of weight [rows, columns], both contiguous: [1, rows].

    Args:
        weight: bfloat16; with `gate`, gates and then what they multiply.
        x: The row.
        out: Where the result goes.
        gate: Return silu(gates) * others, [1, rows / 2].
        norm: Add and normalise first.
        after: Where the sum of x and the residual goes, [1, columns], none of the two; with a residual.
    """
    rows, columns = weight.shape
    rows //= 1 + gate
    if out is None:
        out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    add = norm is not None and norm.residual is not None
    defines = definitions(columns, gate=gate, norm=norm is not None, add=add)
    before, scale, epsilon = x, x, 0.0
    if norm is not None:
        scale, epsilon = norm.scale, norm.epsilon
        before = x if norm.residual is None else norm.residual
    function = compiled(SOURCE, "gemv", defines, x.device.index or 0)
    per_block = WARPS // share_of(columns, gate)
    arguments = (weight, x, out, rows, before, x if after is None else after, scale, epsilon)
    launch(function, -(-rows // per_block), THREADS, arguments)
    return out
