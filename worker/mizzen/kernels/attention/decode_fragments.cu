// SPDX-License-Identifier: Apache-2.0
// Fragments of decode attention on tensor cores: loads, MMAs, QK norm and RoPE of one head. Prepended to
// flash_decode_mma.cu, after bf16.cu.

#if FP8
#define ELEMENTS 16  // elements in 16 bytes of the cache
#define MMA_TYPE "f16"
#else
#define ELEMENTS 8
#define MMA_TYPE "bf16"
#endif
#define KEY_LOADS (HEAD_DIM / (4 * ELEMENTS))  // 16-byte loads of a token's keys per lane
#define VALUE_LOADS (HEAD_DIM / (8 * ELEMENTS))  // 16-byte loads of a token's values per lane
#define QUERY_PAIRS (HEAD_DIM / 8)            // pairs of query elements per lane
#define KEY_BYTES (HEAD_DIM * 16 / ELEMENTS)    // bytes of a token's keys
#define THREADS (WARPS * 32)
#define MIN_SCORE -1.0e30f
#define OUTPUTS (GQA_GROUP * HEAD_DIM)          // outputs of a KV head
#define MERGED_AT_ONCE 8                        // partial results that a thread loads together

#if FP8
__device__ __forceinline__ unsigned pack_operand(float low, float high) {
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ float half_to_float(unsigned short x) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x));
    return value;
}
__device__ __forceinline__ float low_float(unsigned x) { return half_to_float((unsigned short)x); }
__device__ __forceinline__ float high_float(unsigned x) { return half_to_float((unsigned short)(x >> 16)); }
__device__ __forceinline__ unsigned short pack_e4m3x2(float low, float high) {
    unsigned short both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ unsigned e4m3x2_to_f16x2(unsigned short both) {
    unsigned pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(both));
    return pair;
}
__device__ __forceinline__ unsigned low_pair_f16x2(unsigned four) { return e4m3x2_to_f16x2((unsigned short)four); }
__device__ __forceinline__ unsigned high_pair_f16x2(unsigned four) { return e4m3x2_to_f16x2((unsigned short)(four >> 16)); }
#else
__device__ __forceinline__ unsigned pack_operand(float low, float high) { return pack_bf16x2(low, high); }
__device__ __forceinline__ float low_float(unsigned x) { return bf16_low(x); }
__device__ __forceinline__ float high_float(unsigned x) { return bf16_high(x); }
#endif

// Volatile, and not through the read-only path: the compiler must not move it past the PDL wait.
__device__ __forceinline__ uint4 load_kv(const unsigned char* at) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at) : "memory");
    return x;
}
__device__ __forceinline__ void mma(
    float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ unsigned transpose_fragment(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Adds the scores of 16 tokens for one load of their keys: `a` holds tokens 0 to 7, `b` tokens 8 to 15.
__device__ __forceinline__ void add_scores(float* s, uint4 a, uint4 b, const unsigned* q) {
#if FP8
    const unsigned x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        mma(s, low_pair_f16x2(x[i]), low_pair_f16x2(y[i]), high_pair_f16x2(x[i]), high_pair_f16x2(y[i]), q[2 * i], q[2 * i + 1]);
#else
    mma(s, a.x, b.x, a.y, b.y, q[0], q[1]);
    mma(s, a.z, b.z, a.w, b.w, q[2], q[3]);
#endif
}
// Adds values (one word for each of the lane's four tokens) times probabilities to the sums.
__device__ __forceinline__ void add_values(
    float (*sums)[4], unsigned a, unsigned b, unsigned c, unsigned d, unsigned p0, unsigned p1) {
#if FP8
    const unsigned x = __byte_perm(a, b, 0x5140), y = __byte_perm(c, d, 0x5140);
    mma(sums[0], low_pair_f16x2(x), high_pair_f16x2(x), low_pair_f16x2(y), high_pair_f16x2(y), p0, p1);
    const unsigned z = __byte_perm(a, b, 0x7362), w = __byte_perm(c, d, 0x7362);
    mma(sums[1], low_pair_f16x2(z), high_pair_f16x2(z), low_pair_f16x2(w), high_pair_f16x2(w), p0, p1);
#else
    mma(sums[0], __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
        __byte_perm(c, d, 0x7632), p0, p1);
#endif
}

// Loads a lane's elements of a head: i * 4 * ELEMENTS + quarter * ELEMENTS + 0 to ELEMENTS - 1.
__device__ __forceinline__ void load_head(float (*x)[ELEMENTS], const unsigned short* from, int quarter) {
#pragma unroll
    for (int i = 0; i < KEY_LOADS; i++)
#pragma unroll
        for (int j = 0; j < ELEMENTS; j += 8) {
            const uint4 raw = *(const uint4*)(from + (i * 4 + quarter) * ELEMENTS + j);
            const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int k = 0; k < 4; k++)
                x[i][j + 2 * k] = bf16_low(words[k]), x[i][j + 2 * k + 1] = bf16_high(words[k]);
        }
}
// Loads a lane's elements of a head, then applies RMSNorm (with NORM) and RoPE.
__device__ __forceinline__ void norm_rope_head(
    float (*x)[ELEMENTS], const unsigned short* from, const unsigned short* scales, const float* cosines,
    const float* sines, float epsilon, int quarter) {
    load_head(x, from, quarter);
#if NORM
    float squares = 0;
#pragma unroll
    for (int i = 0; i < KEY_LOADS; i++)
#pragma unroll
        for (int j = 0; j < ELEMENTS; j++) squares = fmaf(x[i][j], x[i][j], squares);
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    squares += __shfl_xor_sync(0xffffffffu, squares, 2);
    const float inverse_rms = rsqrtf(squares / HEAD_DIM + epsilon);
#pragma unroll
    for (int i = 0; i < KEY_LOADS; i++)
#pragma unroll
        for (int j = 0; j < ELEMENTS; j += 8) {
            const uint4 raw = *(const uint4*)(scales + (i * 4 + quarter) * ELEMENTS + j);
            const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int k = 0; k < 4; k++)
                x[i][j + 2 * k] *= inverse_rms * bf16_low(words[k]), x[i][j + 2 * k + 1] *= inverse_rms * bf16_high(words[k]);
        }
#endif
#pragma unroll
    for (int i = 0; i < KEY_LOADS / 2; i++)
#pragma unroll
        for (int j = 0; j < ELEMENTS; j += 4) {
            const float4 c = *(const float4*)(cosines + (i * 4 + quarter) * ELEMENTS + j);
            const float4 s = *(const float4*)(sines + (i * 4 + quarter) * ELEMENTS + j);
            const float cs[4] = {c.x, c.y, c.z, c.w}, ss[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float left = x[i][j + k], right = x[i + KEY_LOADS / 2][j + k];
                x[i][j + k] = left * cs[k] - right * ss[k];
                x[i + KEY_LOADS / 2][j + k] = right * cs[k] + left * ss[k];
            }
        }
}
// Starts the sum of the weights with an attention sink, a key whose value is zero, and raises the maximum to its score.
__device__ __forceinline__ void add_sink(float& max_score, float& weight, float score) {
    max_score = fmaxf(max_score, score);
    weight = exp2_approx(score - max_score);
}
// Adds x times a factor to a sum of four outputs.
__device__ __forceinline__ void add_scaled(float4& sum, float4 x, float factor) {
    sum.x = fmaf(x.x, factor, sum.x), sum.y = fmaf(x.y, factor, sum.y);
    sum.z = fmaf(x.z, factor, sum.z), sum.w = fmaf(x.w, factor, sum.w);
}
// Stores four outputs: a weighted sum of values, divided by the sum of the weights.
__device__ __forceinline__ void store_output(unsigned short* out, float4 sum, float weight) {
    *(uint2*)out = make_uint2(pack_bf16x2(sum.x / weight, sum.y / weight), pack_bf16x2(sum.z / weight, sum.w / weight));
}
