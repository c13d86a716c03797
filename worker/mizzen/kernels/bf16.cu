// SPDX-License-Identifier: Apache-2.0
// Conversions between float and pairs of bfloat16 in one 32-bit word; prepended to the kernels that use them.

__device__ __forceinline__ float bf16_low(unsigned x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float bf16_high(unsigned x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ unsigned pack_bf16x2(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
