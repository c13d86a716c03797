// SPDX-License-Identifier: Apache-2.0
// Sizes of coded_mma.cu, to which this text is prepended, and conversion of codes to operands of its products. bf16.cu and
// e2m1.cu are prepended to this text.

typedef unsigned char u8;
typedef unsigned short u16;

#define E2M1 0
#define UINT4 1
#define E4M3 2
#define EXPONENTS 0
#define FLOAT32 1
#define BFLOAT16 2
#define FLOAT16 3

#define WARPS (M_WARPS * K_SPLIT)
#define THREADS (WARPS * 32)
// Codes in a byte; bytes of a row, and of its part in a block of columns.
#define PER_BYTE (CODES == E4M3 ? 1 : 2)
#define LINE (COLUMNS / PER_BYTE)
#define BLOCK_BYTES (128 / PER_BYTE)
// Columns that share a scale, unless all do (BY_ROW), and scales and their bytes of a row.
#define STEP (CODES == E2M1 ? 32 : 128)
#define SCALES (BY_ROW ? 1 : (COLUMNS + STEP - 1) / STEP)
#define SCALE_SIZE (SCALE_TYPE == EXPONENTS ? 1 : SCALE_TYPE == FLOAT32 ? 4 : 2)
#define SCALE_BYTES (SCALES * SCALE_SIZE)
#define BLOCKS ((COLUMNS + 127) / 128)
#define CHUNK_BLOCKS (CHUNK * K_SPLIT)
#define CHUNKS ((BLOCKS + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS)
#define PAIRS (8 * N_TILES)
// Outputs of a tile and of a block; bytes between a lane's two rows; rows of a block.
#define TILE_OUTPUTS (HAS_GATE ? 8 : 16)
#define BLOCK_OUTPUTS (M_WARPS * M_TILES * TILE_OUTPUTS)
#define SECOND_ROW ((HAS_GATE ? SIZE : 8) * LINE)
#define BLOCK_ROWS (M_WARPS * M_TILES * 16)
// Bytes between the inputs of two pairs in a stage, 64 modulo 128, such that the loads of fragments do not conflict.
#define PITCH (CHUNK_BLOCKS * 256 + 64)
#define INPUT_BYTES (PAIRS * PITCH)
// Bytes of codes in a stage: of a row, and of a warp; pieces of 16 bytes of a row; rows that a warp loads at once.
#define STAGE_LINE (CHUNK * BLOCK_BYTES)
#define CODE_BYTES (M_TILES * 16 * STAGE_LINE)
#define PIECES (STAGE_LINE / 16)
#define ROWS_AT_ONCE (32 / PIECES)
// Offsets in shared memory of the codes behind the inputs, and of scales and zero points behind them.
#define CODES_AT (STAGES * INPUT_BYTES)
#define SCALES_AT (CODES_AT + STAGES * WARPS * CODE_BYTES)
#define ZEROS_AT (BLOCK_ROWS * SCALE_BYTES)
// Pairs whose inputs all threads load at once, 16 bytes of a block of 128 columns each.
#define PAIRS_AT_ONCE (THREADS / 16)
#define INPUT_ROWS ((PAIRS + PAIRS_AT_ONCE - 1) / PAIRS_AT_ONCE)
#define NO_EXPERT 0xffffu
// Rows of scales of E4M3 in shared memory, for the rows of a block or, with a gate, for half of them; ROW_STEP rows share scales.
#define SCALE_ROWS ((ROW_TILES * BLOCK_OUTPUTS + ROW_STEP - 2) / ROW_STEP + 1)

__device__ __forceinline__ void mma(float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Returns the bytes of a word that the digits of `selector` name; 8 is added for eight copies of a byte's sign.
__device__ __forceinline__ unsigned permute_bytes(unsigned word, unsigned selector) {
    unsigned result;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(word), "r"(selector));
    return result;
}

// Converts pair `i` of a word of codes, exactly. `operand` is what `load_operand` returns.
//
// UINT4: the code becomes 128 + code, from which 128 + zero point is subtracted. E4M3: exponent and mantissa move to those of
// bfloat16, which gives the number times 2^-120, subnormal numbers included.
__device__ __forceinline__ unsigned decode(unsigned word, int i, unsigned operand) {
#if CODES == E2M1
    return decode_e2m1(word, i, operand);
#elif CODES == E4M3
    // Bytes 2 i and 2 i + 1 are extended by copies of their signs; exponent and mantissa move up by 4 bits.
    return multiply_bf16x2(permute_bytes(word, i == 0 ? 0x9180 : 0xb3a2) << 4 & 0x87f087f0u, operand);
#else
    return subtract_bf16x2(mask_and_set(word >> (4 * i), 0x000f000fu, 0x43004300u), operand);
#endif
}

// Returns the operand of `decode`, twice, for a row of a block's scales and a block of columns. `at` are the scales of the first
// row. UINT4: 128 + zero point. E4M3: 2^120.
__device__ __forceinline__ unsigned load_operand(const u8* at, int row, int block, int t) {
#if CODES == E2M1
    return e2m1_operand(at[row * SCALES + block * 4 + t]);
#elif CODES == E4M3
    return 0x7b807b80u;
#else
    return 0x43004300u + 0x00010001u * (HAS_ZEROS ? at[ZEROS_AT + row * SCALES + block] : 8);
#endif
}

__device__ __forceinline__ float decode_scale(const u8* scale) {
    float value = 1;
    if (SCALE_TYPE == FLOAT32) value = *(const float*)scale;
    if (SCALE_TYPE == BFLOAT16) value = bf16_low(*(const u16*)scale);
    if (SCALE_TYPE == FLOAT16) asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(*(const u16*)scale));
    return value;
}
