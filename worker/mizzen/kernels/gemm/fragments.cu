// SPDX-License-Identifier: Apache-2.0
// Conversion of packed codes to bfloat16 A fragments of mma.m16n8k16; prepended to the kernels that use it.
//
// CODES is the type of the codes (UINT4, INT8 or E4M3). All conversions are exact. fragments.py describes the layout.

#define UINT4 0
#define INT8 1
#define E4M3 2

// Copies byte `index` of a word to the low bytes of both halves, below the bits of bfloat16 128: for codes below 128, the
// numbers 128 + byte.
__device__ __forceinline__ unsigned add_128_to_byte(unsigned word, int index) {
    return __byte_perm(word, 0x43434343u, 0x4040u | index | index << 8);
}

// Converts two signed bytes, in bits 0 to 7 of each half. The low seven bits and the sign bit become 128 + low and
// 128 + 128 * sign, whose difference is low - 128 * sign.
__device__ __forceinline__ unsigned convert_int8x2(unsigned bytes) {
    return subtract_bf16x2(mask_and_set(bytes, 0x007f007fu, 0x43004300u), mask_and_set(bytes, 0x00800080u, 0x43004300u));
}

// Converts two E4M3 numbers, in bits 8 to 15 of each half: exponent and mantissa move to those of bfloat16, which gives
// the number times 2^-120, subnormal numbers included.
__device__ __forceinline__ unsigned convert_e4m3x2(unsigned bytes) {
    return multiply_bf16x2(((bytes & 0x7f007f00u) >> 4) | (bytes & 0x80008000u), 0x7b807b80u);
}

// Zero points of the rows of registers 0 and 2 (`upper`) and of registers 1 and 3 (`lower`): twice bfloat16 128 + z for
// UINT4, and twice bfloat16 z for INT8.
struct ZeroPair {
    unsigned upper, lower;
};

#if CODES == UINT4
// Converts k-step `step` of 64 columns: a[i] = q - z.
__device__ __forceinline__ void convert_fragment(unsigned* a, const unsigned* words, int step, ZeroPair zeros) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = subtract_bf16x2(mask_and_set(words[step] >> (4 * i), 0x000f000fu, 0x43004300u), i % 2 ? zeros.lower : zeros.upper);
}
#else
// Converts k-step `step` of 32 columns. Only INT8 with HAS_ZEROS has zero points.
__device__ __forceinline__ void convert_fragment(unsigned* a, const unsigned* words, int step, ZeroPair zeros) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned word = words[2 * step + i / 2];
#if CODES == E4M3
        a[i] = convert_e4m3x2(i % 2 ? word : word << 8);
#else
        a[i] = convert_int8x2(i % 2 ? word >> 8 : word);
        if (HAS_ZEROS) a[i] = subtract_bf16x2(a[i], i % 2 ? zeros.lower : zeros.upper);
#endif
    }
}
#endif

// Returns the zero points of a lane for 16 rows of a strip; the bytes of `pair` are those of rows lane / 4 and lane / 4 + 8.
__device__ __forceinline__ ZeroPair convert_zeros(unsigned pair) {
#if CODES == UINT4
    return {add_128_to_byte(pair, 0), add_128_to_byte(pair, 1)};
#else
    return {convert_int8x2(__byte_perm(pair, 0, 0x4040u)), convert_int8x2(__byte_perm(pair, 0, 0x4141u))};
#endif
}
