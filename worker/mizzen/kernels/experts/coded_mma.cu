// SPDX-License-Identifier: Apache-2.0
// Products of small batches with quantized experts: the pairs of each expert times its weights, decoded in registers.
//
// Weight rows are the M dimension of mma.m16n8k16 and pairs its N dimension.
//
//   grid       (tiles of weight rows, slots); slot s multiplies the pairs of the s-th of the experts that are chosen
//   block      M_WARPS * K_SPLIT warps; warps that differ in K_SPLIT share rows and add up their sums
//   warp       M_TILES tiles of 16 rows: with a gate, 8 gate rows and the 8 up rows that belong to them
//   block of columns  128 columns: lane (g, t) = (lane / 4, lane % 4) decodes columns 32 t to 32 t + 31 of rows g and g + 8,
//              which are 16 bytes of each row
//   chunk      CHUNK blocks of columns for each of the warps that share rows. STAGES chunks are in shared memory or on their way
//              there: the inputs of up to 8 * N_TILES pairs, and the codes of each warp
//
// The columns of a product may be summed in any order as long as codes and inputs have the same. Words of 8 codes become pairs
// (code i, code i + 4), so the columns of inputs must be in the order 0, 4, 1, 5, 2, 6, 3, 7 within each eight: the first kernel
// brings those of x into this order (PLAIN_INPUTS), and stores its outputs in it. bf16.cu, gate.cu, e2m1.cu,
// coded_operands.cu, coded_parts.cu and coded_pairs.cu are prepended to this text.

struct Problem {
    const u16* x;
    const long long* chosen;
    const u8 *values, *scales, *zeros;
    const u16* bias;
    u16* out;
    int pairs;
    float limit, slope;
};

// What a thread knows about its place. `codes` is where it copies codes from, and `stages` is the shared-memory address of the inputs.
struct Place {
    int lane, warp, row_warp, part, g, t, block_output, tile_output, first_row, offset;
    const u8* codes;
    u8 *shared, *scales;
    unsigned stages;
};

// Chunk of a step: a block goes through all chunks of a tile of rows, then through those of the next.
__device__ __forceinline__ int chunk_of(int step) { return ROW_TILES > 1 ? step % CHUNKS : step; }

// Number of a warp's block of columns `i` within a chunk.
__device__ __forceinline__ int block_of(const Place& at, int chunk, int i) {
    return (chunk * K_SPLIT + at.part) * CHUNK + i;
}

// Starts to copy a warp's codes of a chunk. In odd rows, neighbouring blocks trade places, so that the lanes that read them do not
// conflict.
__device__ __forceinline__ void load_codes(const Place& at, int step, int stage) {
    const int chunk = chunk_of(step), row = at.lane / PIECES, piece = at.lane % PIECES, first = block_of(at, chunk, 0) * BLOCK_BYTES;
    const u8* const from = at.codes + first + (ROW_TILES > 1 ? step / CHUNKS * BLOCK_OUTPUTS * LINE : 0);
    const unsigned to = at.stages + CODES_AT + (stage * WARPS + at.warp) * CODE_BYTES + row * STAGE_LINE
        + (PIECES == 4 ? piece : piece ^ row % 2 * 4) * 16;
    const int odd_row = PIECES == 32 ? (piece ^ 4) * 16 - piece * 16 : 0;  // other loads skip an even number of rows
    if (first + piece * 16 >= LINE) return;  // whatever the codes are, they are multiplied by zero
#pragma unroll
    for (int tile = 0; tile < M_TILES; tile++)
#pragma unroll
        for (int i = 0; i < 16; i += ROWS_AT_ONCE)
            copy_async(to + (tile * 16 + i) * STAGE_LINE + i % 2 * odd_row, from + ((tile * TILE_OUTPUTS + i % 8) * LINE + i / 8 * SECOND_ROW), true);
}

// Copies `rows` rows of scales or zero points to shared memory; with a gate, those of the up projection go behind them.
template <int BYTES>
__device__ __forceinline__ void copy_rows(u8* to, const u8* from, int rows) {
    for (int i = threadIdx.x * 16; i < rows * BYTES; i += THREADS * 16) {
        *(uint4*)(to + i) = *(const uint4*)(from + i);
        if (HAS_GATE) *(uint4*)(to + BLOCK_OUTPUTS * BYTES + i) = *(const uint4*)(from + SIZE * BYTES + i);
    }
}

// Copies the scales of E4M3 to shared memory, as float32; those of the up projection go behind those of the gate.
__device__ __forceinline__ void copy_shared_scales(u8* to, const u8* from, int expert, int block_output) {
    const int last = HELD * SIZE * (1 + HAS_GATE) / ROW_STEP - 1;
    for (int i = threadIdx.x; i < SCALE_ROWS * SCALES * (1 + HAS_GATE); i += THREADS) {
        const int row = i / SCALES, first = expert * SIZE * (1 + HAS_GATE) + row / SCALE_ROWS * SIZE + block_output;
        ((float*)to)[i] = decode_scale(from + (min(first / ROW_STEP + row % SCALE_ROWS, last) * SCALES + i % SCALES) * SCALE_SIZE);
    }
}

// Rows of the inputs of the pairs that a thread copies.
struct InputRows {
    const u16* rows[INPUT_ROWS];
};

// Starts to copy the inputs of a chunk: columns 32 t + 8 q to 32 t + 8 q + 7 of a block go to 64 q + 16 t; with E4M3, columns
// 64 (q / 2) + 16 t + 8 (q % 2) to those + 7.
__device__ __forceinline__ void load_inputs(const Place& at, const InputRows& from, int chunk, int stage, int count) {
    const int pair = threadIdx.x / 16, piece = threadIdx.x % 16;
    const unsigned to = at.stages + stage * INPUT_BYTES + pair * PITCH
        + (CODES == E4M3 ? (piece / 8 * 2 + piece % 2) * 64 + piece % 8 / 2 * 16 : piece % 4 * 64 + piece / 4 * 16);
#pragma unroll
    for (int i = 0; i < INPUT_ROWS; i++) {
        if (pair + i * PAIRS_AT_ONCE >= count) break;
#pragma unroll
        for (int j = 0; j < CHUNK_BLOCKS; j++) {
            const int block = chunk * CHUNK_BLOCKS + j;
            const bool wanted = block * 128 + piece * 8 < COLUMNS;
            copy_async(to + i * PAIRS_AT_ONCE * PITCH + j * 256, from.rows[i] + (wanted ? block * 128 : 0), wanted);
        }
    }
}

// Returns 8 columns of inputs in the order of a word's pairs.
__device__ __forceinline__ uint4 order_inputs(uint4 own) {
    if (!PLAIN_INPUTS) return own;
    return make_uint4(__byte_perm(own.x, own.z, 0x5410), __byte_perm(own.x, own.z, 0x7632),
        __byte_perm(own.y, own.w, 0x5410), __byte_perm(own.y, own.w, 0x7632));
}

// Returns the scale of a row of a block and a block of columns, if all of its columns share one. `at` are the scales in shared
// memory, and `offset` rows before the block share the scales of its first row.
__device__ __forceinline__ float load_scale(const u8* at, int row, int block, int offset) {
#if CODES == E4M3
    const bool up = HAS_GATE && row >= BLOCK_OUTPUTS;
    const int scale_row = (up ? SCALE_ROWS : 0) + (row - (up ? BLOCK_OUTPUTS : 0) + offset) / ROW_STEP;
    return ((const float*)at)[scale_row * SCALES + (BY_ROW ? 0 : block)];
#else
    return decode_scale(at + row * SCALE_BYTES + block * SCALE_SIZE);
#endif
}

// Returns pair `i` of step `q`; E4M3: the second two steps use the second 16 bytes of a lane.
__device__ __forceinline__ unsigned decode_step(const uint4* words, int q, int i, unsigned operand) {
    if (CODES == E4M3) return decode(word_of(words[q / 2], q % 2 * 2 + i / 2), i % 2, operand);
    return decode(word_of(words[0], q), i, operand);
}

// Adds the products of a block of columns to the sums of a warp. `codes` and `inputs` are the lane's in the block.
template <int TILES>
__device__ __forceinline__ void multiply_block(float (*sums)[TILES][4], const u8* codes, const Place& at, int block, const u8* inputs) {
    const int first_row = at.first_row + at.g, second_row = HAS_GATE ? BLOCK_OUTPUTS : 8;
    const int second = at.g % 2 ? -64 : 64;  // from a lane's first 16 bytes of E4M3 to its others
    unsigned operands[M_TILES][2];
    float part[M_TILES][TILES][4] = {};
    float (*const target)[TILES][4] = CODES == E2M1 || BY_ROW ? sums : part;
#pragma unroll
    for (int tile = 0; tile < M_TILES; tile++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            operands[tile][i] = load_operand(at.scales, first_row + tile * TILE_OUTPUTS + i * second_row, block, at.t);
    uint4 words[M_TILES][2][3 - PER_BYTE];
#pragma unroll
    for (int tile = 0; tile < M_TILES; tile++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 3 - PER_BYTE; j++)
                words[tile][i][j] = *(const uint4*)(codes + (tile * 16 + i * 8) * STAGE_LINE + (j == 0 ? 0 : second));
#pragma unroll
    for (int q = 0; q < 4; q++) {
        uint4 b[TILES];
#pragma unroll
        for (int n = 0; n < TILES; n++) b[n] = order_inputs(*(const uint4*)(inputs + n * 8 * PITCH + q * 64));
#pragma unroll
        for (int tile = 0; tile < M_TILES; tile++) {
            unsigned upper[4], lower[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                upper[i] = decode_step(words[tile][0], q, i, operands[tile][0]);
                lower[i] = decode_step(words[tile][1], q, i, operands[tile][1]);
            }
#pragma unroll
            for (int n = 0; n < TILES; n++) mma(target[tile][n], upper[0], lower[0], upper[1], lower[1], b[n].x, b[n].y);
#pragma unroll
            for (int n = 0; n < TILES; n++) mma(target[tile][n], upper[2], lower[2], upper[3], lower[3], b[n].z, b[n].w);
        }
    }
    if (CODES == E2M1 || BY_ROW) return;
#pragma unroll
    for (int tile = 0; tile < M_TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float scale = load_scale(at.scales, first_row + tile * TILE_OUTPUTS + i / 2 * second_row, block, at.offset);
#pragma unroll
            for (int n = 0; n < TILES; n++) sums[tile][n][i] += part[tile][n][i] * scale;
        }
}

// Bytes from the first 16 bytes of a lane in a row of a stage to those of block `i` of the stage.
__device__ __forceinline__ int code_place(int i, int g) {
    if (CODES == E4M3) return i * 128 + g % 2 * 64;
    return CHUNK == 1 ? 0 : (i ^ g % 2) * 64;
}

// Adds up the sums of warps that share rows, in ascending order of their columns; returns whether this warp has the result.
template <int TILES>
__device__ __forceinline__ bool add_parts(float (*sums)[TILES][4], const Place& at) {
    if (K_SPLIT == 1) return true;
    float* const own = (float*)at.shared + at.row_warp * 32 * 4 * M_TILES * TILES + at.lane;
    const int step = M_WARPS * 32 * 4 * M_TILES * TILES;
    if (at.part > 0) {
#pragma unroll
        for (int i = 0; i < 4 * M_TILES * TILES; i++) own[(at.part - 1) * step + i * 32] = (&sums[0][0][0])[i];
    }
    __syncthreads();
    if (at.part > 0) return false;
#pragma unroll
    for (int part = 1; part < K_SPLIT; part++)
#pragma unroll
        for (int i = 0; i < 4 * M_TILES * TILES; i++) (&sums[0][0][0])[i] += own[(part - 1) * step + i * 32];
    return true;
}

template <int TILES>
__device__ __forceinline__ void write_outputs(const Problem& all, float (*sums)[TILES][4], const Place& at, const u16* pairs, int count, int expert) {
    const float factor = CODES == E2M1 ? 9223372036854775808.0f : 1;  // 2^63, see `e2m1_operand`
#pragma unroll
    for (int tile = 0; tile < M_TILES; tile++) {
        const int output = at.tile_output + tile * TILE_OUTPUTS + at.g;
        if (output >= SIZE) break;
        const int row = expert * SIZE * (1 + HAS_GATE) + output, place = output + (PLAIN_INPUTS ? at.g < 4 ? at.g : at.g - 7 : 0);
        float first_factor = factor, second_factor = factor;
        if (BY_ROW) {
            const int block_row = output - at.block_output;
            first_factor = load_scale(at.scales, block_row, 0, at.offset);
            second_factor = load_scale(at.scales, block_row + (HAS_GATE ? BLOCK_OUTPUTS : 8), 0, at.offset);
        }
        const float bias = load_bias(all.bias, row), second_bias = load_bias(all.bias, row + (HAS_GATE ? SIZE : 8));
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int pair = n * 8 + at.t * 2 + i;
                if (pair >= count) continue;
                u16* const out = all.out + (size_t)pairs[pair] * SIZE + place;
                const float first = sums[tile][n][i] * first_factor + bias;
                const float second = sums[tile][n][i + 2] * second_factor + second_bias;
                if (HAS_GATE) {
                    *out = pack_bf16x2(apply_gate(first, second, all.limit, all.slope), 0);
                } else {
                    const unsigned both = pack_bf16x2(first, second);
                    out[0] = both;
                    out[8] = both >> 16;
                }
            }
    }
}

// Multiplies up to 8 * TILES pairs. The codes of the first stages are on their way.
template <int TILES>
__device__ __forceinline__ void multiply_pairs(const Problem& all, Place at, const u16* pairs, int count, int expert) {
    float sums[M_TILES][TILES][4] = {};
    InputRows rows;
#pragma unroll
    for (int i = 0; i < INPUT_ROWS; i++) {
        const int pair = threadIdx.x / 16 + i * PAIRS_AT_ONCE;
        rows.rows[i] = all.x + (pair < count ? (size_t)(pairs[pair] / PER_ROW) * COLUMNS : 0) + threadIdx.x % 16 * 8;
    }
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        load_inputs(at, rows, chunk_of(i), i, count);
        commit();
    }
    const u8* const inputs = at.shared + at.g * PITCH + at.part * CHUNK * 256 + at.t * 16;
    const u8* const codes = at.shared + CODES_AT + at.warp * CODE_BYTES + at.g * STAGE_LINE + at.t * 16;
    int stage = 0, free_stage = STAGES - 1;
#pragma unroll 1
    for (int step = 0; step < ROW_TILES * CHUNKS; step++) {
        const int chunk = chunk_of(step);
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < ROW_TILES * CHUNKS) {
            load_codes(at, step + STAGES - 1, free_stage);
            load_inputs(at, rows, chunk_of(step + STAGES - 1), free_stage, count);
        }
        commit();
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            const int block = block_of(at, chunk, i), place = code_place(i, at.g);
            if (block < BLOCKS)
                multiply_block<TILES>(sums, codes + stage * WARPS * CODE_BYTES + place, at, block, inputs + stage * INPUT_BYTES + i * 256);
        }
        free_stage = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        if (ROW_TILES > 1 && chunk == CHUNKS - 1) {
            write_outputs<TILES>(all, sums, at, pairs, count, expert);
#pragma unroll
            for (int i = 0; i < 4 * M_TILES * TILES; i++) (&sums[0][0][0])[i] = 0;
            at.tile_output += BLOCK_OUTPUTS, at.first_row += BLOCK_OUTPUTS;
        }
    }
    if (ROW_TILES > 1) return;
    __syncthreads();
    if (add_parts<TILES>(sums, at)) write_outputs<TILES>(all, sums, at, pairs, count, expert);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) coded_mma(
    const u16* x, const long long* chosen, const u8* values, const u8* scales, const u8* zeros, const u16* bias, u16* out,
    int pair_count, float limit, float slope) {
    const Problem all = {x, chosen, values, scales, zeros, bias, out, pair_count, limit, slope};
    extern __shared__ __align__(128) u8 shared[];
    __shared__ unsigned present[32];
    __shared__ u16 picks[MAX_PAIRS];
    __shared__ int counts[WARPS];
    Place at;
    at.lane = threadIdx.x % 32, at.warp = threadIdx.x / 32, at.g = at.lane / 4, at.t = at.lane % 4;
    at.row_warp = at.warp % M_WARPS, at.part = at.warp / M_WARPS;
    at.shared = shared, at.scales = shared + SCALES_AT, at.stages = (unsigned)__cvta_generic_to_shared(shared);
    at.block_output = blockIdx.x * ROW_TILES * BLOCK_OUTPUTS, at.first_row = at.row_warp * M_TILES * TILE_OUTPUTS, at.offset = at.block_output % ROW_STEP;
    at.tile_output = at.block_output + at.first_row;
    const bool one_token = CODES == E4M3 && HAS_GATE && PER_ROW <= HELD && all.pairs == PER_ROW;  // slots are pairs
    if (threadIdx.x < 32) present[threadIdx.x] = 0;
    // The second kernel is launched once all blocks of the first have waited for the router.
    if (HAS_GATE) asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    int expert, total = 1;
    if (one_token) {
        const long long own = load_choice(all.chosen + blockIdx.y);
        expert = own >= 0 && own < HELD ? own : -1;
    } else {
        __syncthreads();
        load_picks(picks, present, all.chosen, all.pairs);
        __syncthreads();
        expert = find_expert(present, blockIdx.y);
    }
    if (expert < 0) {
        // If no expert is chosen at all, the second kernel must still not end before the first.
        if (!HAS_GATE && blockIdx.y == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
        return;
    }
    // Rows behind the last are computed from those of the last tile, and not written.
    const int first_row = min(at.tile_output, SIZE - M_TILES * TILE_OUTPUTS) + at.lane / PIECES;
    at.codes = all.values + ((size_t)expert * SIZE * (1 + HAS_GATE) + first_row) * LINE + at.lane % PIECES * 16;
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++)
        if (i < ROW_TILES * CHUNKS) load_codes(at, i, i);
    const size_t block_row = (size_t)expert * SIZE * (1 + HAS_GATE) + at.block_output;
    const int block_rows = min(BLOCK_OUTPUTS, SIZE - at.block_output);
    if (CODES == E4M3) copy_shared_scales(at.scales, all.scales, expert, at.block_output);
    else copy_rows<SCALE_BYTES>(at.scales, all.scales + block_row * SCALE_BYTES, block_rows);
    if (HAS_ZEROS) copy_rows<SCALES>(at.scales + ZEROS_AT, all.zeros + block_row * SCALES, block_rows);
    if (one_token) {
        if (threadIdx.x == 0) picks[0] = blockIdx.y;
    } else {
        total = collect_pairs(picks, counts, all.pairs, expert);
    }
    if (!HAS_GATE) asm volatile("griddepcontrol.wait;" ::: "memory");
    __syncthreads();
    for (int first = 0; first < total; first += PAIRS) {
        if (first > 0) {
            __syncthreads();  // the sums of the pairs before are where inputs are stored
            for (int i = 0; i < STAGES - 1; i++)
                if (i < ROW_TILES * CHUNKS) load_codes(at, i, i);
        }
        const int count = min(PAIRS, total - first), tiles = (count + 7) / 8;
        const u16* const pairs = picks + first;
        if (tiles == 1) multiply_pairs<1>(all, at, pairs, count, expert);
#if N_TILES >= 2
        else if (tiles == 2) multiply_pairs<2>(all, at, pairs, count, expert);
#endif
#if N_TILES >= 3
        else if (tiles == 3) multiply_pairs<3>(all, at, pairs, count, expert);
#endif
#if N_TILES >= 4
        else if (N_TILES == 4 || tiles == 4) multiply_pairs<4>(all, at, pairs, count, expert);
#endif
#if N_TILES >= 6
        else if (tiles <= 6) multiply_pairs<6>(all, at, pairs, count, expert);
#endif
#if N_TILES >= 8
        else multiply_pairs<8>(all, at, pairs, count, expert);
#endif
    }
}
