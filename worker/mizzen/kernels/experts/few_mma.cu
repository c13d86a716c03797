// SPDX-License-Identifier: Apache-2.0
// Products of a few tokens with experts whose codes are E4M3: a warp multiplies 16 weight rows of an expert by columns of one pair.
//
//   grid    (tiles of weight rows, pairs) with a gate, (tiles of weight rows, tokens) without
//   block   M_WARPS * K_SPLIT warps with a gate, M_WARPS * K_SPLIT * PER_TOKEN without; warps that share rows have different columns
//           or experts, and their sums are added in this order
//   warp    16 rows: with a gate, 8 gate rows and the 8 up rows that belong to them. PART blocks of 128 columns, at most 8; each
//           lane (g, t) = (lane / 4, lane % 4) decodes columns 16 t to 16 t + 15 of each half of a block, of rows g and g + 8
//
// Weight rows are the M dimension of mma.m16n8k16. Column n of its other operand are the inputs of the warp's n-th block of columns,
// which lane (n, t) keeps in registers. The products of the n-th block of codes have their own sums. Only column n of
// these is used, which is the sum for that block of columns, and is multiplied by its scale. bf16.cu, gate.cu, coded_operands.cu
// and coded_parts.cu are prepended to this text.

#define PART ((BLOCKS + K_SPLIT - 1) / K_SPLIT)
#define SLOTS (HAS_GATE ? 1 : PER_TOKEN)
#define ALL_WARPS (M_WARPS * K_SPLIT * SLOTS)
// Bytes of a stage, 16 rows of a block of columns, and of those of a warp.
#define STAGE_BYTES 2048
#define WARP_BYTES (STAGE_BYTES * (STAGES < PART ? STAGES : PART))

// What a warp multiplies: its part of the columns, and the row of each lane and the row that is mma's eighth behind it.
struct Rows {
    int lane, g, t, first_block, first, second;
    unsigned stages;
};

// Starts to copy block `j` of a warp's part to a stage. In odd rows, the halves of 64 bytes trade places, so that the lanes that
// read them do not conflict.
__device__ __forceinline__ void load_block(const Rows& at, const u8* codes, int j) {
    const int row = at.lane / 8, piece = at.lane % 8, byte = (at.first_block + j) * 128 + piece * 16;
    const unsigned to = at.stages + j % STAGES * STAGE_BYTES + row * 128 + (piece ^ row % 2 * 4) * 16;
    if (byte >= COLUMNS) return;  // whatever the codes are, they are multiplied by zero
#pragma unroll
    for (int i = 0; i < 16; i += 4) copy_async(to + i * 128, codes + byte + i % 8 * COLUMNS + i / 8 * SECOND_ROW, true);
}

__device__ __forceinline__ uint4 load_past_l1(const u16* from) {
    uint4 words;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "l"(from) : "memory");
    return words;
}

// Returns the scale of a row, and of block `j` of a warp's part unless all columns share one.
__device__ __forceinline__ float row_scale(const Rows& at, const u8* scales, int row, int j) {
    const int block = at.first_block + j;
    if (BY_ROW) return decode_scale(scales + row / ROW_STEP * SCALE_SIZE);
    return block < BLOCKS ? decode_scale(scales + (row / ROW_STEP * SCALES + block) * SCALE_SIZE) : 0;
}

// Adds the products of block `j` of codes, all of them, to `sums`.
__device__ __forceinline__ void multiply_codes(float* sums, const Rows& at, const u8* shared, int j, const uint4* inputs) {
    const u8* const codes = shared + j % STAGES * STAGE_BYTES + at.g * 128 + at.t * 16;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int place = (half ^ at.g % 2) * 64;
        const uint4 upper = *(const uint4*)(codes + place), lower = *(const uint4*)(codes + 8 * 128 + place);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned operand = load_operand(0, 0, 0, 0), first = word_of(upper, i), second = word_of(lower, i);
            const uint4 b = inputs[half * 2 + i / 2];
            mma(sums, decode(first, 0, operand), decode(second, 0, operand), decode(first, 1, operand), decode(second, 1, operand),
                i % 2 ? b.z : b.x, i % 2 ? b.w : b.y);
        }
    }
}

// Returns the sum of a value over the lanes with the same row.
__device__ __forceinline__ float add_lanes(float value) {
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}

// Multiplies a warp's rows by its part of the inputs; returns the sums of rows g and g + 8, the same in each lane (g, t). The copies
// of the first stages are on their way.
__device__ __forceinline__ float2 multiply_part(const Rows& at, const u16* inputs, const u8* codes, const u8* scales, const u8* shared) {
    float scale[2][2], sums[PART][4] = {};
#pragma unroll
    for (int i = 0; i < 2; i++)
        scale[0][i] = row_scale(at, scales, at.first, 2 * at.t + i), scale[1][i] = row_scale(at, scales, at.second, 2 * at.t + i);
    if (!HAS_GATE) asm volatile("griddepcontrol.wait;" ::: "memory");
    uint4 own[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int column = (at.first_block + at.g) * 128 + i / 2 * 64 + at.t * 16 + i % 2 * 8;
        own[i] = at.g < PART && column < COLUMNS ? load_past_l1(inputs + column) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < PART; j++) {
        wait_for_copies<STAGES - 2>();
        __syncwarp();
        if (j + STAGES - 1 < PART) load_block(at, codes, j + STAGES - 1);
        commit();
        multiply_codes(sums[j], at, shared, j, own);
    }
    float2 total = {0, 0};
#pragma unroll
    for (int j = 0; j < PART; j++) {
        if (at.t != j / 2) continue;
        total.x += sums[j][j % 2] * scale[0][j % 2];
        total.y += sums[j][2 + j % 2] * scale[1][j % 2];
    }
    return {add_lanes(total.x), add_lanes(total.y)};
}

extern "C" __global__ void __launch_bounds__(ALL_WARPS * 32, BLOCKS_PER_SM) few_mma(
    const u16* x, const long long* chosen, const float* factors, const u8* values, const u8* scales, const u16* bias, const u16* added,
    void* out, float limit, float slope) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ float results[ALL_WARPS][2][8];
    const int warp = threadIdx.x / 32, row_warp = warp % M_WARPS, part = warp / M_WARPS % K_SPLIT, slot = warp / (M_WARPS * K_SPLIT);
    const int pair = HAS_GATE ? blockIdx.y : blockIdx.y * PER_TOKEN + slot;
    const int block_output = blockIdx.x * M_WARPS * TILE_OUTPUTS, output = block_output + row_warp * TILE_OUTPUTS;
    u8* const own_shared = shared + warp * WARP_BYTES;
    Rows at;
    at.lane = threadIdx.x % 32, at.g = at.lane / 4, at.t = at.lane % 4, at.first_block = part * PART;
    at.stages = (unsigned)__cvta_generic_to_shared(own_shared);
    // The second kernel is launched once all blocks of the first have waited for the router.
    if (HAS_GATE) asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    const long long expert = load_choice(chosen + pair);
    const bool held = expert >= 0 && expert < HELD;
    if (HAS_GATE && !held) return;
    float2 total = {0, 0};
    if (held && output < SIZE) {
        const int row = (int)expert * SIZE * (1 + HAS_GATE) + output;
        at.first = row + at.g, at.second = at.first + (HAS_GATE ? SIZE : 8);
        const u8* const codes = values + (size_t)(row + at.lane / 8) * COLUMNS;
#pragma unroll
        for (int j = 0; j < STAGES - 1; j++) {
            if (j < PART) load_block(at, codes, j);
            commit();
        }
        const float first_bias = part == 0 ? load_bias(bias, at.first) : 0, second_bias = part == 0 ? load_bias(bias, at.second) : 0;
        float factor = 1;
        if (!HAS_GATE) asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(factor) : "l"(factors + pair) : "memory");
        total = multiply_part(at, x + (size_t)(HAS_GATE ? pair / PER_TOKEN : pair) * COLUMNS, codes, scales, own_shared);
        total.x = factor * (total.x + first_bias), total.y = factor * (total.y + second_bias);
    } else if (!HAS_GATE) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
    }
    if (at.t == 0) results[warp][0][at.g] = total.x, results[warp][1][at.g] = total.y;
    // For each output, one thread adds up the results of the warps that share its row, and the element of `added`.
    const int i = threadIdx.x, place = block_output + i;
    const bool writes = i < M_WARPS * TILE_OUTPUTS && place < SIZE;
    float sum = 0;
    if (!HAS_GATE && writes && HAS_ADDED) sum = __uint_as_float(added[(size_t)blockIdx.y * SIZE + place] << 16);
    __syncthreads();
    if (!writes) return;
    const int from = i / TILE_OUTPUTS, within = i % TILE_OUTPUTS;
    float up = 0;
#pragma unroll
    for (int j = from; j < ALL_WARPS; j += M_WARPS) {
        sum += results[j][within / 8][within % 8];
        if (HAS_GATE) up += results[j][1][within];
    }
    const size_t to = (size_t)blockIdx.y * SIZE + place;
    if (HAS_GATE) sum = apply_gate(sum, up, limit, slope);
    if (FLOAT_OUTPUT) ((float*)out)[to] = sum;
    else ((u16*)out)[to] = pack_bf16x2(sum, 0);
}
