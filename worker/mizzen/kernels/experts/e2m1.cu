// SPDX-License-Identifier: Apache-2.0
// Conversion of E2M1 codes to bfloat16; prepended to the kernels that use it. bf16.cu is prepended to this text.

// Converts pair `i` of a word of codes, exactly. `operand` is what `e2m1_operand` returns: exponent and mantissa move to those of
// bfloat16, which gives the number times 2^-126, subnormal numbers included; this is multiplied by the scale.
__device__ __forceinline__ unsigned decode_e2m1(unsigned word, int i, unsigned operand) {
    // The product has two copies of each code, 6 bits apart, which do not overlap.
    const unsigned code = (i < 2 ? word : word >> 8) & (i % 2 ? 0x00f000f0u : 0x000f000fu);
    return multiply_bf16x2((code * (i % 2 ? 0x104u : 0x1040u)) & 0x81c081c0u, operand);
}

// Returns the operand of `decode_e2m1`, twice, for the exponent of a scale: the scale times 2^63, but at most 2^127.
__device__ __forceinline__ unsigned e2m1_operand(unsigned exponent) { return min(exponent + 63u, 254u) * 0x00800080u; }
