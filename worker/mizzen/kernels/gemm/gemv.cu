// SPDX-License-Identifier: Apache-2.0
__device__ __forceinline__ float dot_bf16x2(unsigned a, unsigned b, float sum) {
    return fmaf(bf16_high(a), bf16_high(b), fmaf(bf16_low(a), bf16_low(b), sum));
}
__device__ __forceinline__ unsigned add_bf16x2(unsigned a, unsigned b) {
    return pack_bf16x2(bf16_low(a) + bf16_low(b), bf16_high(a) + bf16_high(b));
}
__device__ __forceinline__ unsigned scale_bf16x2(unsigned x, float inverse_rms, unsigned scale) {
    return pack_bf16x2(bf16_low(x) * inverse_rms * bf16_low(scale), bf16_high(x) * inverse_rms * bf16_high(scale));
}
__device__ __forceinline__ float square_bf16x2(unsigned x) { return fmaf(bf16_high(x), bf16_high(x), bf16_low(x) * bf16_low(x)); }
// Volatile, and not through the read-only path: the compiler must not move these loads across the PDL wait.
__device__ __forceinline__ uint4 load_constant(const uint4* at) {
    uint4 w;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(at) : "memory");
    return w;
}
__device__ __forceinline__ uint4 load_input(const uint4* at) {
    uint4 v;  // visible after the PDL wait; the warps of a block share it in L1
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ float warp_sum(float sum) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    return sum;
}

#define VECTORS_PER_THREAD ((VECTORS + 255) / 256)

// GEMV: weight [rows * (1 + SWIGLU), VECTORS * 8], x [VECTORS * 8] -> out [rows], all bfloat16, 16-byte aligned.
// NORM applies RMSNorm to the input first; ADD adds `residual` to x before that and stores the sum in `new_residual`.
// SWIGLU computes silu(gate) * up, where the weight holds the gate rows and then the up rows. BIAS, without SWIGLU, adds
// bias [rows] before the outputs are rounded.
extern "C" __global__ void __launch_bounds__(256)
gemv(const uint4* weight, const uint4* x, unsigned short* out, int rows,
     const uint4* residual, uint4* new_residual, const uint4* scale, float epsilon
#if BIAS
     , const unsigned short* bias
#endif
) {
    __shared__ float partial[(1 + SWIGLU) * 8];
    asm volatile("griddepcontrol.launch_dependents;");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = blockIdx.x * (8 / WARPS_PER_ROW) + warp / WARPS_PER_ROW;
    const int first = warp % WARPS_PER_ROW * 32 + lane;
    uint4 w[1 + SWIGLU][LOADS];
#pragma unroll
    for (int half = 0; half <= SWIGLU; half++)
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int index = first + i * WARPS_PER_ROW * 32;
            w[half][i] = make_uint4(0, 0, 0, 0);
            if (row < rows && index < VECTORS)
                w[half][i] = load_constant(weight + (size_t)(row + half * rows) * VECTORS + index);
        }
#if BIAS
    const float own_bias = row < rows ? bf16_low(bias[row]) : 0;
#endif
#if NORM
    __shared__ uint4 normed[VECTORS];
    __shared__ float squares[8];
    uint4 scales[VECTORS_PER_THREAD], h[VECTORS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < VECTORS_PER_THREAD; i++) {
        const int index = threadIdx.x + i * 256;
        scales[i] = make_uint4(0, 0, 0, 0);
        if (index < VECTORS) scales[i] = load_constant(scale + index);
    }
#endif
    // PDL wait: outputs of earlier kernels are neither read nor overwritten before this point.
    asm volatile("griddepcontrol.wait;" ::: "memory");
#if NORM
    float total = 0;
#pragma unroll
    for (int i = 0; i < VECTORS_PER_THREAD; i++) {
        const int index = threadIdx.x + i * 256;
        h[i] = make_uint4(0, 0, 0, 0);
        if (index < VECTORS) {
            h[i] = load_input(x + index);
#if ADD
            const uint4 b = load_input(residual + index);
            h[i].x = add_bf16x2(h[i].x, b.x), h[i].y = add_bf16x2(h[i].y, b.y);
            h[i].z = add_bf16x2(h[i].z, b.z), h[i].w = add_bf16x2(h[i].w, b.w);
            if (blockIdx.x == 0) new_residual[index] = h[i];
#endif
        }
        total += square_bf16x2(h[i].x) + square_bf16x2(h[i].y) + square_bf16x2(h[i].z) + square_bf16x2(h[i].w);
    }
    total = warp_sum(total);
    if (lane == 0) squares[warp] = total;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) total += squares[i];
    const float inverse_rms = rsqrtf(total / (VECTORS * 8) + epsilon);
#pragma unroll
    for (int i = 0; i < VECTORS_PER_THREAD; i++) {
        const int index = threadIdx.x + i * 256;
        if (index < VECTORS)
            normed[index] = make_uint4(scale_bf16x2(h[i].x, inverse_rms, scales[i].x), scale_bf16x2(h[i].y, inverse_rms, scales[i].y),
                scale_bf16x2(h[i].z, inverse_rms, scales[i].z), scale_bf16x2(h[i].w, inverse_rms, scales[i].w));
    }
    __syncthreads();
#endif
    float sums[1 + SWIGLU] = {};
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int index = first + i * WARPS_PER_ROW * 32;
        if (index < VECTORS) {
#if NORM
            const uint4 v = normed[index];
#else
            const uint4 v = load_input(x + index);
#endif
#pragma unroll
            for (int half = 0; half <= SWIGLU; half++) {
                float sum = dot_bf16x2(w[half][i].x, v.x, sums[half]);
                sum = dot_bf16x2(w[half][i].y, v.y, sum);
                sum = dot_bf16x2(w[half][i].z, v.z, sum);
                sums[half] = dot_bf16x2(w[half][i].w, v.w, sum);
            }
        }
    }
#pragma unroll
    for (int half = 0; half <= SWIGLU; half++) sums[half] = warp_sum(sums[half]);
    if (WARPS_PER_ROW > 1) {
        if (lane == 0)
            for (int half = 0; half <= SWIGLU; half++) partial[half * 8 + warp] = sums[half];
        __syncthreads();
        for (int half = 0; half <= SWIGLU; half++) {
            sums[half] = 0;
            for (int i = 0; i < WARPS_PER_ROW; i++) sums[half] += partial[half * 8 + warp / WARPS_PER_ROW * WARPS_PER_ROW + i];
        }
    }
    if (row < rows && lane == 0 && warp % WARPS_PER_ROW == 0) {
        float sum = sums[0];
#if SWIGLU
        const unsigned rounded = pack_bf16x2(sums[0], sums[1]);
        sum = bf16_low(rounded) / (1 + __expf(-bf16_low(rounded))) * bf16_high(rounded);
#endif
#if BIAS
        sum += own_bias;
#endif
        out[row] = (unsigned short)pack_bf16x2(sum, 0.0f);
    }
}
