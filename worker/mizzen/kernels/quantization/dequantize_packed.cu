// SPDX-License-Identifier: Apache-2.0
// Restores a weight of the fragment layout (see fragments.py) as row-major bfloat16: w = (q - z) * s, rounded once.
//
//   grid       (groups of CHUNKS chunks of 64 columns, strips of 64 rows)
//   block      4 warps with 16 rows each
//
// BITS is 4 or 8; E4M3 tells floats from integers of 8 bits. LAYOUT of the scales: 0 a scale for each row, 1 for eight rows
// and a group, 2 for a row and a group. SCALE_TYPE: 0 float32, 1 bfloat16, 2 float16. ZEROS: whether zero points are stored.
// bf16.cu is prepended to this text.

typedef unsigned int u32;

// Shared memory of a warp: 16 rows of 64 columns; the 16-byte vectors of a row are swizzled to avoid bank conflicts.
#define WARP_BYTES 2048

__device__ __forceinline__ float half_to_float(unsigned short x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

__device__ __forceinline__ float load_scale(const void* scales, size_t at) {
#if SCALE_TYPE == 0
    return ((const float*)scales)[at];
#elif SCALE_TYPE == 1
    return __uint_as_float((u32)((const unsigned short*)scales)[at] << 16);
#else
    return half_to_float(((const unsigned short*)scales)[at]);
#endif
}

// Values of a pair of columns, from the two codes of a register.
__device__ __forceinline__ float2 decode_pair(const uint4& words, int step, int reg) {
    const u32 all[4] = {words.x, words.y, words.z, words.w};
#if BITS == 4
    const u32 word = all[step];
    return make_float2((float)(word >> reg * 4 & 15), (float)(word >> (reg * 4 + 16) & 15));
#else
    const u32 word = all[step * 2 + reg / 2] >> reg % 2 * 8;
#if E4M3
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)__byte_perm(word, 0, 0x4420)));
    return make_float2(half_to_float((unsigned short)halves), half_to_float((unsigned short)(halves >> 16)));
#else
    return make_float2((float)(signed char)word, (float)(signed char)(word >> 16));
#endif
#endif
}

extern "C" __global__ void __launch_bounds__(128)
dequantize_packed(const uint4* values, const void* scales, const unsigned char* zeros, uint4* out,
                  int chunks, int columns, int group_columns, int groups, int first_strip, int rows) {
    constexpr int VECTORS = BITS == 4 ? 1 : 2;  // of 16 bytes for 64 columns
    __shared__ __align__(128) unsigned char shared[4 * WARP_BYTES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, strip = first_strip + blockIdx.y;
    const int first = blockIdx.x * CHUNKS;
    const uint4* source = values + (size_t)strip * chunks * VECTORS * 128 + threadIdx.x;
    uint4 words[CHUNKS][VECTORS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
#pragma unroll
        for (int j = 0; j < VECTORS; j++)
            if (first + i < chunks) words[i][j] = __ldg(source + ((first + i) * VECTORS + j) * 128);
    asm volatile("griddepcontrol.launch_dependents;");
    // PDL wait: outputs of earlier kernels are neither read nor overwritten before this point.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const u32 tile = (u32)__cvta_generic_to_shared(shared + warp * WARP_BYTES);
    const int half = rows / 2;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        if (first + i >= chunks) break;
#pragma unroll
        for (int step = 0; step < 4; step++) {
            const int group = min(((first + i) * 64 + step * 16) / group_columns, groups - 1);
            float scale[2], zero[2] = {IMPLIED_ZERO, IMPLIED_ZERO};
            const size_t table = (size_t)strip * groups + group;
#pragma unroll
            for (int octet = 0; octet < 2; octet++) {
                const size_t own = table * 64 + lane / 4 * 8 + warp * 2 + octet;
#if LAYOUT == 0
                scale[octet] = load_scale(scales, (size_t)strip * 64 + warp * 16 + octet * 8 + lane / 4);
#elif LAYOUT == 1
                scale[octet] = load_scale(scales, table * 8 + warp * 2 + octet);
#else
                scale[octet] = load_scale(scales, own);
#endif
#if ZEROS
                zero[octet] = BITS == 4 ? (float)zeros[own] : (float)(signed char)zeros[own];
#endif
            }
            u32 pairs[4];
#pragma unroll
            for (int reg = 0; reg < 4; reg++) {
                const float2 q = decode_pair(words[i][BITS == 4 ? 0 : step / 2], BITS == 4 ? step : step % 2, reg);
                pairs[reg] = pack_bf16x2((q.x - zero[reg % 2]) * scale[reg % 2], (q.y - zero[reg % 2]) * scale[reg % 2]);
            }
            // Matrix lane / 8 of the store: rows 8 * (matrix % 2) and on, vector 2 * step + matrix / 2.
            const int row = lane % 8 + lane / 8 % 2 * 8, vector = (step * 2 + lane / 16) ^ (row % 8);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                :: "r"(tile + row * 128 + vector * 16), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3]) : "memory");
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int row = j * 4 + lane / 8, vector = lane % 8, column = (first + i) * 64 + vector * 8;
            const int packed = blockIdx.y * 64 + warp * 16 + row, pair = packed / 16 * 8 + packed % 8;
            const int target = SWIGLU ? pair + packed / 8 % 2 * half : packed;
            const bool inside = column < columns && (SWIGLU ? pair < half : packed < rows);
            if (inside) out[((size_t)target * columns + column) / 8] = *(const uint4*)(shared + warp * WARP_BYTES + row * 128 + (vector ^ (row % 8)) * 16);
        }
        __syncwarp();
    }
}
