# SPDX-License-Identifier: Apache-2.0
"""Decodes codes of quantized weights in registers, by shifts: no tables and no conversions.

A code of E4M3 or E2M1 whose exponent and mantissa are put where those of a wider float are is the code's
value times a power of two, also if it is subnormal. An unsigned integer in the low bits of the mantissa of
a power of two adds to it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mizzen.layers.quantized.canonical import Codes

KINDS = {Codes.E4M3: 0, Codes.INT8: 1, Codes.UINT8: 2, Codes.UINT4: 3, Codes.E2M1: 4}
"""Number of each type of codes in kernels."""

# In each, a register holds two words of 16 bits; the codes at the same place in both words become two
# bfloat16 of a register. No code moves to another register. Results are written before the words are read for
# the last time (`=&r`).
_E4M3_ASM = tl.constexpr(
    """{
    .reg .b32 s, m, f;
    mov.b32 f, 0x7B807B80;
    shl.b32 s, $2, 8;
    and.b32 s, s, 0x80008000;
    shl.b32 m, $2, 4;
    and.b32 m, m, 0x07F007F0;
    or.b32 m, m, s;
    mul.rn.bf16x2 $0, m, f;
    and.b32 s, $2, 0x80008000;
    shr.u32 m, $2, 4;
    and.b32 m, m, 0x07F007F0;
    or.b32 m, m, s;
    mul.rn.bf16x2 $1, m, f;
    }"""
)
_E2M1_SCALED_ASM = tl.constexpr(
    """{
    .reg .b32 s;
    shl.b32 s, $4, 12;
    and.b32 s, s, 0x80008000;
    shl.b32 $0, $4, 6;
    and.b32 $0, $0, 0x01C001C0;
    or.b32 $0, $0, s;
    shl.b32 s, $4, 8;
    and.b32 s, s, 0x80008000;
    shl.b32 $1, $4, 2;
    and.b32 $1, $1, 0x01C001C0;
    or.b32 $1, $1, s;
    shl.b32 s, $4, 4;
    and.b32 s, s, 0x80008000;
    shr.u32 $2, $4, 2;
    and.b32 $2, $2, 0x01C001C0;
    or.b32 $2, $2, s;
    and.b32 s, $4, 0x80008000;
    shr.u32 $3, $4, 6;
    and.b32 $3, $3, 0x01C001C0;
    or.b32 $3, $3, s;
    }"""
)
_UINT4_ASM = tl.constexpr(
    """{
    .reg .b32 m, z;
    mov.b32 z, ZERO;
    and.b32 m, $4, 0x000F000F;
    or.b32 m, m, 0x43004300;
    sub.rn.bf16x2 $0, m, z;
    shr.u32 m, $4, 4;
    and.b32 m, m, 0x000F000F;
    or.b32 m, m, 0x43004300;
    sub.rn.bf16x2 $1, m, z;
    shr.u32 m, $4, 8;
    and.b32 m, m, 0x000F000F;
    or.b32 m, m, 0x43004300;
    sub.rn.bf16x2 $2, m, z;
    shr.u32 m, $4, 12;
    and.b32 m, m, 0x000F000F;
    or.b32 m, m, 0x43004300;
    sub.rn.bf16x2 $3, m, z;
    }"""
)
_UINT4_OWN_ZEROS_ASM = tl.constexpr(_UINT4_ASM.value.replace("ZERO", "0x43004300"))
_UINT4_IMPLIED_ZERO_ASM = tl.constexpr(_UINT4_ASM.value.replace("ZERO", "0x43084308"))


@triton.jit
def _small_integer(bits, ZERO: tl.constexpr):
    """Return integers from 0 to 255, int32, minus a zero point, as float32."""
    return (bits | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def decode_scaled(codes, KIND: tl.constexpr, ZEROS: tl.constexpr):
    """Return the values of codes, int32, as float32: those of E4M3 times 2 ** -120, E2M1 times 2 ** -126.

    Zero points that the codes imply are subtracted; with ZEROS, none are.
    """
    # Branches of constants must not return: Triton would compile what follows them.
    if KIND == 0:
        values = (((codes & 0x7F) << 20) | ((codes & 0x80) << 24)).to(tl.float32, bitcast=True)
    elif KIND == 4:
        values = (((codes & 7) << 22) | ((codes & 8) << 28)).to(tl.float32, bitcast=True)
    elif KIND == 1:
        values = _small_integer((codes ^ 0x80) & 0xFF, 128)
    elif ZEROS:
        values = _small_integer(codes, 0)
    else:
        values = _small_integer(codes, 128 if KIND == 2 else 8)
    return values


@triton.jit
def _decode(codes, dtype: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr):
    """Return the values of codes, int32, in a floating-point type; those of E2M1 times 2 ** -126."""
    values = decode_scaled(codes, KIND, ZEROS)
    if KIND == 0:
        values *= 1.329227995784916e36  # 2 ** 120
    return values.to(dtype)


@triton.jit
def decode_words(words, dtype: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, ASM: tl.constexpr):
    """Return the values of the codes in words, int16: four tiles, from the lowest code of each word on.

    If a word holds two codes, the last two tiles are the first two. Values of E2M1 are times 2 ** -126. `ASM`
    selects instructions for pairs of bfloat16.
    """
    if ASM and KIND == 0:
        first, second = tl.inline_asm_elementwise(
            _E4M3_ASM, "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
        third, fourth = first, second
    elif ASM and KIND == 3:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _UINT4_OWN_ZEROS_ASM if ZEROS else _UINT4_IMPLIED_ZERO_ASM, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif ASM and KIND == 4:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _E2M1_SCALED_ASM, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif KIND >= 3:
        bits = words.to(tl.int32)
        first, second = _decode(bits & 15, dtype, KIND, ZEROS), _decode((bits >> 4) & 15, dtype, KIND, ZEROS)
        third, fourth = (
            _decode((bits >> 8) & 15, dtype, KIND, ZEROS), _decode((bits >> 12) & 15, dtype, KIND, ZEROS),
        )  # fmt: skip
    else:
        bits = words.to(tl.int32)
        first = _decode(bits & 255, dtype, KIND, ZEROS)
        second = _decode((bits >> 8) & 255, dtype, KIND, ZEROS)
        third, fourth = first, second
    return first, second, third, fourth


@triton.jit
def decode_scale(scales, dtype: tl.constexpr):
    """Return scales in a floating-point type; bytes are exponents of E8M0 from 0 to 254."""
    if scales.dtype == tl.uint8:
        exponents = scales.to(tl.int32)
        bits = tl.where(exponents == 0, 1 << 22, exponents << 23)  # 2 ** -127 is subnormal
        values = bits.to(tl.float32, bitcast=True).to(dtype)
    else:
        values = scales.to(dtype)
    return values


@triton.jit
def decode_large_scale(scales, dtype: tl.constexpr):
    """Return scales, exponents of E8M0 from 0 to 254, times 2 ** 63, but at most 2 ** 127."""
    exponents = tl.minimum(scales.to(tl.int32) + 63, 254)
    return (exponents << 23).to(tl.float32, bitcast=True).to(dtype)
