// SPDX-License-Identifier: Apache-2.0
// RMSNorm of a single bfloat16 row, optionally of its sum with the residual stream, by a block of WARPS warps.
//
// Every block of a GEMM that reads the row repeats this work. NORM_COLUMNS is the length of the row, a multiple of 8; 0 leaves
// this text empty. bf16.cu is prepended to this text.

#if NORM_COLUMNS
#define NORM_THREADS (WARPS * 32)
#define ROW_VECTORS (NORM_COLUMNS / 8)
// Vectors of 8 elements for each thread.
#define NORM_VECTORS ((ROW_VECTORS + NORM_THREADS - 1) / NORM_THREADS)

// Norm [NORM_COLUMNS] before a GEMM. With `residual`, the row is added to it first, and the sum is stored in `sum`.
struct RowNorm {
    const unsigned short *residual, *weight;
    unsigned short* sum;
    float epsilon;
};

// Volatile, and not through the read-only path: the compiler must not move these loads across the PDL wait.
__device__ __forceinline__ uint4 load_vector(const unsigned short* from, int index) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"((const uint4*)from + index) : "memory");
    return v;
}

__device__ __forceinline__ unsigned add_pair(unsigned a, unsigned b) { return pack_bf16x2(bf16_low(a) + bf16_low(b), bf16_high(a) + bf16_high(b)); }
__device__ __forceinline__ float square_pair(unsigned a) { return fmaf(bf16_high(a), bf16_high(a), bf16_low(a) * bf16_low(a)); }
__device__ __forceinline__ unsigned scale_pair(unsigned a, float factor, unsigned b) {
    return pack_bf16x2(bf16_low(a) * factor * bf16_low(b), bf16_high(a) * factor * bf16_high(b));
}

// Loads this thread's vectors of the norm's weight, which does not depend on earlier kernels.
__device__ __forceinline__ void load_norm_weight(uint4* scales, const RowNorm& norm) {
#pragma unroll
    for (int i = 0; i < NORM_VECTORS; i++) {
        const int index = threadIdx.x + i * NORM_THREADS;
        scales[i] = index < ROW_VECTORS ? load_vector(norm.weight, index) : make_uint4(0, 0, 0, 0);
    }
}

// Normalises the row x and writes it to `target` in shared memory, where all threads of the block can then read it; the
// block with `stores_sum` also stores the sum with the residual stream. `scales` are those of `load_norm_weight`.
__device__ __forceinline__ void normalise_row(const unsigned short* x, const RowNorm& norm, const uint4* scales, unsigned char* target, bool stores_sum) {
    __shared__ float squares[WARPS];
    uint4 row[NORM_VECTORS], residual[NORM_VECTORS];
#pragma unroll
    for (int i = 0; i < NORM_VECTORS; i++) {
        const int index = threadIdx.x + i * NORM_THREADS;
        row[i] = residual[i] = make_uint4(0, 0, 0, 0);
        if (index < ROW_VECTORS) {
            row[i] = load_vector(x, index);
            if (norm.residual) residual[i] = load_vector(norm.residual, index);
        }
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < NORM_VECTORS; i++) {
        const int index = threadIdx.x + i * NORM_THREADS;
        if (norm.residual) {
            row[i] = make_uint4(add_pair(row[i].x, residual[i].x), add_pair(row[i].y, residual[i].y), add_pair(row[i].z, residual[i].z), add_pair(row[i].w, residual[i].w));
            if (stores_sum && index < ROW_VECTORS) ((uint4*)norm.sum)[index] = row[i];
        }
        sum += square_pair(row[i].x) + square_pair(row[i].y) + square_pair(row[i].z) + square_pair(row[i].w);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += squares[i];
    const float factor = rsqrtf(sum / NORM_COLUMNS + norm.epsilon);
#pragma unroll
    for (int i = 0; i < NORM_VECTORS; i++) {
        const int index = threadIdx.x + i * NORM_THREADS;
        if (index < ROW_VECTORS)
            ((uint4*)target)[index] = make_uint4(scale_pair(row[i].x, factor, scales[i].x), scale_pair(row[i].y, factor, scales[i].y),
                scale_pair(row[i].z, factor, scales[i].z), scale_pair(row[i].w, factor, scales[i].w));
    }
    __syncthreads();
}
#endif
