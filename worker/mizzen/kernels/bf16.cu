// SPDX-License-Identifier: Apache-2.0
// Conversions between float and pairs of bfloat16 in one 32-bit word, and operations on such pairs; prepended to the kernels
// that use them.

__device__ __forceinline__ float bf16_low(unsigned x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float bf16_high(unsigned x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ unsigned pack_bf16x2(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ unsigned subtract_bf16x2(unsigned a, unsigned b) {
    unsigned difference;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
}
__device__ __forceinline__ unsigned multiply_bf16x2(unsigned a, unsigned b) {
    unsigned product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
// (word & mask) | bits, in one instruction. The compiler would use two, because an instruction has one literal at most.
__device__ __forceinline__ unsigned mask_and_set(unsigned word, unsigned mask, unsigned bits) {
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
    return result;
}
