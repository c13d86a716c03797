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
// brings those of x into this order (PLAIN_INPUTS), and stores its outputs in it. bf16.cu and coded_operands.cu are
// prepended to this text.

struct Problem {
    const u16* x;
    const long long* chosen;
    const u8 *values, *scales, *zeros;
    const u16* bias;
    u16* out;
    int pairs;
    float limit, slope;
};

// Starts to copy 16 bytes to shared memory; zeros if they are not wanted.
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}

// What a thread knows about its place. `codes` is where it copies codes from, and `stages` is the shared-memory address of the inputs.
struct Place {
    int lane, warp, row_warp, part, g, t, tile_output;
    const u8* codes;
    u8 *shared, *scales;
    unsigned stages;
};

// Number of a warp's block of columns `i` within a chunk.
__device__ __forceinline__ int block_of(const Place& at, int chunk, int i) {
    return (chunk * K_SPLIT + at.part) * CHUNK + i;
}

// Starts to copy a warp's codes of a chunk. In odd rows, neighbouring blocks trade places, so that the lanes that read them do not
// conflict.
__device__ __forceinline__ void load_codes(const Place& at, int chunk, int stage) {
    const int row = at.lane / (CHUNK * 4), piece = at.lane % (CHUNK * 4), first = block_of(at, chunk, 0) * 64;
    const u8* const from = at.codes + first;
    const unsigned to = at.stages + CODES_AT + (stage * WARPS + at.warp) * CODE_BYTES + row * STAGE_LINE
        + (CHUNK == 1 ? piece : piece ^ row % 2 * 4) * 16;
    if (first + piece * 16 >= LINE) return;  // whatever the codes are, they are multiplied by zero
#pragma unroll
    for (int tile = 0; tile < M_TILES; tile++)
#pragma unroll
        for (int i = 0; i < 16; i += ROWS_AT_ONCE)
            copy_async(to + (tile * 16 + i) * STAGE_LINE, from + ((tile * TILE_OUTPUTS + i % 8) * LINE + i / 8 * SECOND_ROW), true);
}

// Copies `rows` rows of scales or zero points to shared memory; with a gate, those of the up projection go behind them.
template <int BYTES>
__device__ __forceinline__ void copy_rows(u8* to, const u8* from, int rows) {
    for (int i = threadIdx.x * 16; i < rows * BYTES; i += THREADS * 16) {
        *(uint4*)(to + i) = *(const uint4*)(from + i);
        if (HAS_GATE) *(uint4*)(to + BLOCK_OUTPUTS * BYTES + i) = *(const uint4*)(from + SIZE * BYTES + i);
    }
}

// Returns the expert that is the `slot`-th of those in a bit mask, or -1; all lanes of a warp take part.
__device__ __forceinline__ int find_expert(const unsigned* present, int slot) {
    const int lane = threadIdx.x % 32;
    unsigned word = lane < (HELD + 31) / 32 ? present[lane] : 0;
    int before = __popc(word);
    const int own = before;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        const int other = __shfl_up_sync(~0u, before, i);
        if (lane >= i) before += other;
    }
    before -= own;
    int found = -1;
    if (before <= slot && slot < before + own) {
        for (int i = before; i < slot; i++) word &= word - 1;
        found = lane * 32 + __ffs(word) - 1;
    }
    return __reduce_max_sync(~0u, found);
}

// Moves the pairs of an expert to the front of `picks`, which hold the experts of all pairs, in ascending order; returns their
// number. One warp calls it.
__device__ __forceinline__ int collect_pairs(u16* picks, int pairs, int expert) {
    const int lane = threadIdx.x % 32;
    int count = 0;
    for (int first = 0; first < pairs; first += 32) {
        const bool own = first + lane < pairs && picks[first + lane] == expert;
        const unsigned all = __ballot_sync(~0u, own);
        if (own) picks[count + __popc(all & ((1u << lane) - 1))] = first + lane;
        count += __popc(all);
        __syncwarp();
    }
    return count;
}

// Rows of the inputs of the pairs that a thread copies.
struct InputRows {
    const u16* rows[INPUT_ROWS];
};

// Starts to copy the inputs of a chunk: columns 32 t + 8 q to 32 t + 8 q + 7 of a block go to 64 q + 16 t.
__device__ __forceinline__ void load_inputs(const Place& at, const InputRows& from, int chunk, int stage, int count) {
    const int pair = threadIdx.x / 16, piece = threadIdx.x % 16;
    const unsigned to = at.stages + stage * INPUT_BYTES + pair * PITCH + piece % 4 * 64 + piece / 4 * 16;
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

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` groups of this thread's copies are on their way.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

__device__ __forceinline__ unsigned word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// Returns 8 columns of inputs in the order of a word's pairs.
__device__ __forceinline__ uint4 order_inputs(uint4 own) {
    if (!PLAIN_INPUTS) return own;
    return make_uint4(__byte_perm(own.x, own.z, 0x5410), __byte_perm(own.x, own.z, 0x7632),
        __byte_perm(own.y, own.w, 0x5410), __byte_perm(own.y, own.w, 0x7632));
}

// Adds the products of a block of columns to the sums of a warp. `codes` and `inputs` are the lane's in the block.
template <int TILES>
__device__ __forceinline__ void multiply_block(float (*sums)[TILES][4], const u8* codes, const Place& at, int block, const u8* inputs) {
    const int first_row = at.row_warp * M_TILES * TILE_OUTPUTS + at.g, second_row = HAS_GATE ? BLOCK_OUTPUTS : 8;
    unsigned operands[M_TILES][2];
    float part[M_TILES][TILES][4] = {};
    float (*const target)[TILES][4] = CODES == E2M1 ? sums : part;
#pragma unroll
    for (int tile = 0; tile < M_TILES; tile++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            operands[tile][i] = load_operand(at.scales, first_row + tile * TILE_OUTPUTS + i * second_row, block, at.t);
    uint4 words[M_TILES][2];
#pragma unroll
    for (int tile = 0; tile < M_TILES; tile++)
#pragma unroll
        for (int i = 0; i < 2; i++) words[tile][i] = *(const uint4*)(codes + (tile * 16 + i * 8) * STAGE_LINE);
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
                upper[i] = decode(word_of(words[tile][0], q), i, operands[tile][0]);
                lower[i] = decode(word_of(words[tile][1], q), i, operands[tile][1]);
            }
#pragma unroll
            for (int n = 0; n < TILES; n++) mma(target[tile][n], upper[0], lower[0], upper[1], lower[1], b[n].x, b[n].y);
#pragma unroll
            for (int n = 0; n < TILES; n++) mma(target[tile][n], upper[2], lower[2], upper[3], lower[3], b[n].z, b[n].w);
        }
    }
    if (CODES == E2M1) return;
#pragma unroll
    for (int tile = 0; tile < M_TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float scale = load_scale(at.scales, first_row + tile * TILE_OUTPUTS + i / 2 * second_row, block);
#pragma unroll
            for (int n = 0; n < TILES; n++) sums[tile][n][i] += part[tile][n][i] * scale;
        }
}

__device__ __forceinline__ float apply_gate(float gate, float up, float limit, float slope) {
    float exponent = -gate;
    // 0.5 * (1 + tanh(z)) equals the sigmoid of 2 z.
    if (GATE == GELU_TANH) exponent = -1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    if (GATE == CLAMPED_SWIGLU) {
        // Comparisons keep NaN, unlike fminf.
        gate = gate > limit ? limit : gate;
        up = (up > limit ? limit : up < -limit ? -limit : up) + 1;
        exponent = -slope * gate;
    }
    return __fdividef(gate, 1 + __expf(exponent)) * up;
}

__device__ __forceinline__ float load_bias(const u16* bias, int row) { return HAS_BIAS ? __uint_as_float(bias[row] << 16) : 0; }

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
    const float factor = CODES == E2M1 ? 9223372036854775808.0f : 1;  // 2^63, see `load_operand`
#pragma unroll
    for (int tile = 0; tile < M_TILES; tile++) {
        const int output = at.tile_output + tile * TILE_OUTPUTS + at.g;
        if (output >= SIZE) break;
        const int row = expert * SIZE * (1 + HAS_GATE) + output, place = output + (HAS_GATE ? at.g < 4 ? at.g : at.g - 7 : 0);
        const float bias = load_bias(all.bias, row), second_bias = load_bias(all.bias, row + (HAS_GATE ? SIZE : 8));
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int pair = n * 8 + at.t * 2 + i;
                if (pair >= count) continue;
                u16* const out = all.out + (size_t)pairs[pair] * SIZE + place;
                const float first = sums[tile][n][i] * factor + bias, second = sums[tile][n][i + 2] * factor + second_bias;
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
__device__ __forceinline__ void multiply_pairs(const Problem& all, const Place& at, const u16* pairs, int count, int expert) {
    float sums[M_TILES][TILES][4] = {};
    InputRows rows;
#pragma unroll
    for (int i = 0; i < INPUT_ROWS; i++) {
        const int pair = threadIdx.x / 16 + i * PAIRS_AT_ONCE;
        rows.rows[i] = all.x + (pair < count ? (size_t)(pairs[pair] / PER_ROW) * COLUMNS : 0) + threadIdx.x % 16 * 8;
    }
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        load_inputs(at, rows, i, i, count);
        commit();
    }
    const u8* const inputs = at.shared + at.g * PITCH + at.part * CHUNK * 256 + at.t * 16;
    const u8* const codes = at.shared + CODES_AT + at.warp * CODE_BYTES + at.g * STAGE_LINE + at.t * 16;
    int stage = 0, free_stage = STAGES - 1;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        if (chunk + STAGES - 1 < CHUNKS) {
            load_codes(at, chunk + STAGES - 1, free_stage);
            load_inputs(at, rows, chunk + STAGES - 1, free_stage, count);
        }
        commit();
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            const int block = block_of(at, chunk, i), place = CHUNK == 1 ? 0 : (i ^ at.g % 2) * 64;
            if (block < BLOCKS)
                multiply_block<TILES>(sums, codes + stage * WARPS * CODE_BYTES + place, at, block, inputs + stage * INPUT_BYTES + i * 256);
        }
        free_stage = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
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
    __shared__ int total;
    Place at;
    at.lane = threadIdx.x % 32, at.warp = threadIdx.x / 32, at.g = at.lane / 4, at.t = at.lane % 4;
    at.row_warp = at.warp % M_WARPS, at.part = at.warp / M_WARPS;
    at.shared = shared, at.scales = shared + SCALES_AT, at.stages = (unsigned)__cvta_generic_to_shared(shared);
    const int block_output = blockIdx.x * BLOCK_OUTPUTS;
    at.tile_output = block_output + at.row_warp * M_TILES * TILE_OUTPUTS;
    if (threadIdx.x < 32) present[threadIdx.x] = 0;
    // The second kernel is launched once all blocks of the first have waited for the router.
    if (HAS_GATE) asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    __syncthreads();
    for (int i = threadIdx.x; i < all.pairs; i += THREADS) {
        long long expert;
        asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(expert) : "l"(all.chosen + i) : "memory");
        const bool held = expert >= 0 && expert < HELD;
        picks[i] = held ? expert : NO_EXPERT;
        if (held) atomicOr(present + expert / 32, 1u << expert % 32);
    }
    __syncthreads();
    const int expert = find_expert(present, blockIdx.y);
    if (expert < 0) {
        // If no expert is chosen at all, the second kernel must still not end before the first.
        if (!HAS_GATE && blockIdx.y == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
        return;
    }
    // Rows behind the last are computed from those of the last tile, and not written.
    const int first_row = min(at.tile_output, SIZE - M_TILES * TILE_OUTPUTS) + at.lane / (CHUNK * 4);
    at.codes = all.values + ((size_t)expert * SIZE * (1 + HAS_GATE) + first_row) * LINE + at.lane % (CHUNK * 4) * 16;
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) load_codes(at, i, i);
    const size_t block_row = (size_t)expert * SIZE * (1 + HAS_GATE) + block_output;
    const int block_rows = min(BLOCK_OUTPUTS, SIZE - block_output);
    copy_rows<SCALE_BYTES>(at.scales, all.scales + block_row * SCALE_BYTES, block_rows);
    if (HAS_ZEROS) copy_rows<SCALES>(at.scales + ZEROS_AT, all.zeros + block_row * SCALES, block_rows);
    if (at.warp == 0) {
        const int count = collect_pairs(picks, all.pairs, expert);
        if (at.lane == 0) total = count;
    }
    if (!HAS_GATE) asm volatile("griddepcontrol.wait;" ::: "memory");
    __syncthreads();
    for (int first = 0; first < total; first += PAIRS) {
        if (first > 0) {
            __syncthreads();  // the sums of the pairs before are where inputs are stored
            for (int i = 0; i < STAGES - 1; i++) load_codes(at, i, i);
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
