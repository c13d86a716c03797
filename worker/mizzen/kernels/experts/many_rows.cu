// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM of many pairs of each expert: out = x * transpose(weight of the expert), in bfloat16 or E4M3 with float32 sums.
//
// As in gemm/swap_ab.cu, the wgmma M dimension is weight rows and its N dimension the pairs. An expert's pairs are divided
// evenly into blocks, and N is a multiple of PAIR_STEP, so that few rows are wasted.
//
//   grid       persistent: every cluster takes each `clusters`-th tile of 256 weight rows and of up to CLUSTER * PAIRS pairs
//   cluster    CLUSTER blocks with different pairs share the tile's weight rows: each loads its part into all of them
//   block      two consumer warpgroups of 128 weight rows each, then a producer warpgroup that gives up its registers
//
// A pipeline stage is 128 bytes of the inner dimension of both operands, in the 128-byte swizzle that wgmma reads. Weights are
// loaded by TMA. With SWIGLU, the rows of x are those of the pairs' tokens, copied by cp.async; otherwise they are in the order of
// the sorted pairs, and loaded by TMA.
//
// SWIGLU     eight gate rows alternate with their eight up rows (see `make_expert_map`); outputs are activation(gate) * up, in the
//            order of the sorted pairs, where GATE is the number of the activation (see gate.py). Otherwise outputs are written to
//            the rows of the pairs.
// BIAS       each weight row of each expert has a bias in bfloat16.
// FP8        both operands are E4M3. The tensor cores add with fewer bits than float32, so the sums of each stage, of 128
//            columns, are multiplied by the stage's scales and added to float32 sums. Outputs with SWIGLU are E4M3, too, with a
//            scale for each pair and 128 columns.
// BY_ROW     (FP8) all columns of a weight row share a scale.
//
// `wgmma<N>`, bf16.cu, gate.cu, gemm/hopper.cu and many_rows_loads.cu are prepended to this text.

#define TILE_OUTPUTS (SWIGLU ? TILE_ROWS / 2 : TILE_ROWS)
#define GROUP_OUTPUTS (TILE_OUTPUTS / 2)
// Outputs go through a staging tile of CHUNK pairs for each warpgroup. E4M3 outputs have a scale for those of both warpgroups, which
// therefore share two tiles: one is filled while the other is read.
#define SHARED_STAGING (SWIGLU && FP8)
#define CHUNK 32
#define PITCH ((SHARED_STAGING ? TILE_OUTPUTS : GROUP_OUTPUTS) + 8)
#define STAGING_BYTES (CHUNK * PITCH * 2)

#define WARPGROUP_BARRIER(group) asm volatile("bar.sync %0, 128;" :: "r"(1 + (group)) : "memory")
#define CONSUMER_BARRIER() asm volatile("bar.sync 3, 256;" ::: "memory")
#define STAGING_BARRIER(group) do { if (SHARED_STAGING) CONSUMER_BARRIER(); else WARPGROUP_BARRIER(group); } while (0)
#define KEEP_REGISTER(x) asm volatile("" : "+f"(x) :: "memory")

// What belongs to weight rows: scales [row steps, groups], and biases of all experts' rows. An expert has `rows` of them.
struct RowParameters {
    const float* scales;
    const u16* bias;
    int row_step, groups, rows;
};

struct GateLimits {
    float limit, slope;
};

struct Outputs {
    void* values;
    float* scales;
    int size, scale_stride;
};

// Releases a stage to every block that writes to it.
__device__ __forceinline__ void release_stage(u32 empty, u32 slot) {
    __syncwarp();
#if CLUSTER > 1
    if (threadIdx.x % 32 < CLUSTER)
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(map_to_rank(empty + slot * 8, threadIdx.x % 32)) : "memory");
#else
    if (threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(empty + slot * 8) : "memory");
#endif
}

template <int pending>
__device__ __forceinline__ void wait_groups() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(pending) : "memory");
}

template <int size>
__device__ __forceinline__ void set_zero(float (&sums)[2][size]) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < size; i++) sums[half][i] = 0;
}

#if !FP8
// Multiplies all stages of a tile. Two stages are in flight.
template <int N>
__device__ __forceinline__ void multiply_stages(float (&sums)[2][N / 2], u32 base, u32 full, u32 empty, Pipeline& at, int steps) {
    u32 previous = 0;
    set_zero(sums);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        wait_barrier(full + at.slot * 8, at.phase);
        const u32 stage = base + at.slot * STAGE_BYTES;
        const u64 left = smem_descriptor(stage + threadIdx.x / 128 * 128 * 128), right = smem_descriptor(stage + WEIGHT_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; k++) {
            wgmma<N>(sums[0], left + k * 2, right + k * 2, 1);
            wgmma<N>(sums[1], left + 512 + k * 2, right + k * 2, 1);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        wait_groups<1>();
        if (step) release_stage(empty, previous);
        previous = at.slot;
        at.advance();
    }
    wait_groups<0>();
    release_stage(empty, previous);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) KEEP_REGISTER(sums[half][i]);
}
#else
// Starts the product of a stage's columns, for N pairs and half `half` of this warpgroup's rows.
template <int N>
__device__ __forceinline__ void start_half(float (&products)[N / 2], u32 stage, int half) {
    const u64 left = smem_descriptor(stage + (threadIdx.x / 128 * 128 + half * 64) * 128);
    const u64 right = smem_descriptor(stage + WEIGHT_BYTES);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma<N>(products, left + k * 2, right + k * 2, k);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Adds products to the float32 sums. `low` and `high` are the scales of this thread's two rows, `x` those of its pairs.
template <int N>
__device__ __forceinline__ void add_products(float* sums, float (&products)[N / 2], float low, float high, const float2* x) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) KEEP_REGISTER(products[i]);
#pragma unroll
    for (int group = 0; group < N / 8; group++) {
        const float2 scale = x[group * 4];
        float* d = sums + group * 4;
        const float* p = products + group * 4;
        const float a = BY_ROW ? 1 : low, b = BY_ROW ? 1 : high;
        d[0] = fmaf(p[0], a * scale.x, d[0]), d[1] = fmaf(p[1], a * scale.y, d[1]);
        d[2] = fmaf(p[2], b * scale.x, d[2]), d[3] = fmaf(p[3], b * scale.y, d[3]);
    }
}

// Multiplies a stage. While products are added to the sums, the other warpgroup may multiply.
template <int N>
__device__ __forceinline__ void multiply_stage(float (&sums)[2][N / 2], const float (&rows)[4], const float2* x, u32 stage) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float products[N / 2];
        start_half<N>(products, stage, half);
        wait_groups<0>();
        add_products<N>(sums[half], products, rows[half * 2], rows[half * 2 + 1], x);
    }
}

// Multiplies all stages of a tile. `low` and `high` point at the scales of this thread's two rows of both halves.
template <int N>
__device__ __forceinline__ void multiply_stages(float (&sums)[2][N / 2], const float* (&low)[2], const float* (&high)[2], const float* scales, u32 base, u32 full, u32 empty, Pipeline& at, int steps) {
    float next[4] = {__ldg(low[0]), __ldg(high[0]), __ldg(low[1]), __ldg(high[1])};
    set_zero(sums);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const float rows[4] = {next[0], next[1], next[2], next[3]};
        const int following = min(step + 1, steps - 1);
        if (!BY_ROW) next[0] = __ldg(low[0] + following), next[1] = __ldg(high[0] + following), next[2] = __ldg(low[1] + following), next[3] = __ldg(high[1] + following);
        wait_barrier(full + at.slot * 8, at.phase);
        multiply_stage<N>(sums, rows, (const float2*)(scales + at.slot * PAIRS) + threadIdx.x % 4, base + at.slot * STAGE_BYTES);
        release_stage(empty, at.slot);
        at.advance();
    }
#if BY_ROW
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) sums[half][i] *= next[half * 2 + i % 4 / 2];
#endif
}
#endif

// Writes the outputs of both halves for eight pairs to the staging tile, transposed: a row for each pair.
__device__ __forceinline__ void stage_pairs(u32 at, int group, const float* a, const float* b, const GateLimits& limits) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const u32 row = at + (group * 8 + lane % 8) * (PITCH * 2);
#if SWIGLU
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
        :: "r"(row + warp * 16 + lane / 8 % 2 * 64), "r"(pack_bf16x2(apply_gate(a[0], a[2], limits.limit, limits.slope), apply_gate(a[1], a[3], limits.limit, limits.slope))),
           "r"(pack_bf16x2(apply_gate(b[0], b[2], limits.limit, limits.slope), apply_gate(b[1], b[3], limits.limit, limits.slope))) : "memory");
#else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
        :: "r"(row + warp * 32 + lane / 8 % 2 * 16 + lane / 16 * 128), "r"(pack_bf16x2(a[0], a[1])), "r"(pack_bf16x2(a[2], a[3])),
           "r"(pack_bf16x2(b[0], b[1])), "r"(pack_bf16x2(b[2], b[3])) : "memory");
#endif
}

// Stages the outputs of a chunk of a tile's N pairs.
template <int N>
__device__ __forceinline__ void stage_chunk(u32 at, int chunk, const float (&sums)[2][N / 2], const GateLimits& limits) {
#pragma unroll
    for (int i = 0; i < CHUNK / 8; i++) {
        const int columns = chunk * (CHUNK / 8) + i;
        if (columns < N / 8) stage_pairs(at, i, sums[0] + columns * 4, sums[1] + columns * 4, limits);
    }
}

#if SHARED_STAGING
__device__ __forceinline__ u32 pack_e4m3x4(float a, float b, float c, float d) {
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return low | (u32)high << 16;
}

// Quantizes the staged outputs of a chunk, whose first pair in the tile is `from`, and writes them. All rows are handled, so that
// all lanes take part in the maxima.
__device__ __forceinline__ void quantize_chunk(const unsigned char* staging, const Outputs& out, const Tile& tile, int from) {
#pragma unroll
    for (int i = 0; i < CHUNK * 16 / 256; i++) {
        const int row = threadIdx.x / 16 + i * 16, piece = threadIdx.x % 16, column = tile.rows * TILE_OUTPUTS + piece * 8;
        const bool inside = from + row < tile.count && column < out.size;
        const uint4 words = inside ? *(const uint4*)(staging + row * (PITCH * 2) + piece * 16) : make_uint4(0, 0, 0, 0);
        const u32 word[4] = {words.x, words.y, words.z, words.w};
        float v[8], largest = 1e-10f;
#pragma unroll
        for (int j = 0; j < 4; j++) v[j * 2] = bf16_low(word[j]), v[j * 2 + 1] = bf16_high(word[j]);
#pragma unroll
        for (int j = 0; j < 8; j++) largest = fmaxf(largest, fabsf(v[j]));
#pragma unroll
        for (int mask = 1; mask < 16; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
        const float inverse = __fdividef(448, largest);
        if (inside) {
            uint2 codes;
            codes.x = pack_e4m3x4(v[0] * inverse, v[1] * inverse, v[2] * inverse, v[3] * inverse);
            codes.y = pack_e4m3x4(v[4] * inverse, v[5] * inverse, v[6] * inverse, v[7] * inverse);
            const size_t to = tile.start + from + row;
            *(uint2*)((unsigned char*)out.values + to * out.size + column) = codes;
            if (piece == 0) out.scales[(size_t)tile.rows * out.scale_stride + to] = largest * (1 / 448.0f);
        }
    }
}
#else
// Copies the staged outputs of a chunk, whose first pair in the tile is `from`, to memory.
__device__ __forceinline__ void copy_chunk(const unsigned char* staging, const Outputs& out, const Tile& tile, const int* pair_rows, int from, int group) {
    const int pieces = GROUP_OUTPUTS / 8, rows = min(CHUNK, tile.count - from), first = tile.rows * TILE_OUTPUTS + group * GROUP_OUTPUTS;
#pragma unroll
    for (int i = 0; i < CHUNK * pieces / 128; i++) {
        const int row = (i * 128 + threadIdx.x % 128) / pieces, piece = threadIdx.x % pieces, column = first + piece * 8;
        if (row < rows && column < out.size) {
            const size_t to = SWIGLU ? tile.start + from + row : pair_rows[from + row];
            *(uint4*)((u16*)out.values + to * out.size + column) = *(const uint4*)(staging + row * (PITCH * 2) + piece * 16);
        }
    }
}
#endif

// Writes the outputs of a tile. A staging tile is filled again when all threads have passed the barrier after they read it.
template <int N>
__device__ __forceinline__ void write_outputs(const float (&sums)[2][N / 2], const Outputs& out, const Tile& tile, const GateLimits& limits, unsigned char* staging, const int* pair_rows, u32& buffer) {
    const int group = threadIdx.x / 128;
#pragma unroll
    for (int chunk = 0; chunk < (N + CHUNK - 1) / CHUNK; chunk++) {
        unsigned char* const own = staging + ((SHARED_STAGING ? 0 : group) + buffer) * STAGING_BYTES;
        if (!SHARED_STAGING) STAGING_BARRIER(group);
        stage_chunk<N>(shared_address(own) + (SHARED_STAGING ? group * GROUP_OUTPUTS * 2 : 0), chunk, sums, limits);
        STAGING_BARRIER(group);
#if SHARED_STAGING
        quantize_chunk(own, out, tile, chunk * CHUNK);
#else
        copy_chunk(own, out, tile, pair_rows, chunk * CHUNK, group);
#endif
        if (SHARED_STAGING) buffer ^= 1;
    }
}

// Finds the rows, among those of all experts, whose sums this thread has in both halves of its warpgroup's rows: with SwiGLU, a
// gate row and its up row.
__device__ __forceinline__ void find_rows(size_t (&low)[2], size_t (&high)[2], const Tile& tile, int rows) {
    const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane_row = threadIdx.x % 32 / 4, size = SWIGLU ? rows / 2 : rows;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int block = group * 8 + half * 4 + warp, own = tile.rows * TILE_OUTPUTS + block * (SWIGLU ? 8 : 16) + lane_row;
        // Outputs of rows behind the last one are not written.
        const int low_row = min(own, size - 1), high_row = SWIGLU ? size + low_row : min(own + 8, size - 1);
        low[half] = (size_t)tile.expert * rows + low_row, high[half] = (size_t)tile.expert * rows + high_row;
    }
}

// Multiplies a tile of up to N pairs and writes its outputs.
template <int N>
__device__ __forceinline__ void run_tile(const Tile& tile, const Outputs& out, const int* pairs, const RowParameters& parameters, const GateLimits& limits, unsigned char* staging, int* pair_rows, const float* scales, u32 base, u32 full, u32 empty, Pipeline& at, int steps, u32& buffer, int parity) {
    float sums[2][N / 2];
#if !SWIGLU
    // The rows of the outputs arrive while the tile is multiplied.
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
    const int row_0 = thread < tile.count ? pairs[tile.start + thread] : 0;
    const int row_1 = PAIRS > 128 && thread + 128 < tile.count ? pairs[tile.start + thread + 128] : 0;
#endif
#if FP8 || BIAS
    size_t low_row[2], high_row[2];
    find_rows(low_row, high_row, tile, parameters.rows);
#endif
#if BIAS
    float biases[4];
#pragma unroll
    for (int half = 0; half < 2; half++)
        biases[half * 2] = bf16_low(__ldg(parameters.bias + low_row[half])), biases[half * 2 + 1] = bf16_low(__ldg(parameters.bias + high_row[half]));
#endif
#if FP8
    const float *low[2], *high[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        low[half] = parameters.scales + low_row[half] / parameters.row_step * parameters.groups;
        high[half] = parameters.scales + high_row[half] / parameters.row_step * parameters.groups;
    }
    multiply_stages<N>(sums, low, high, scales, base, full, empty, at, steps);
#else
    multiply_stages<N>(sums, base, full, empty, at, steps);
#endif
#if BIAS
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) sums[half][i] += biases[half * 2 + i % 4 / 2];
#endif
#if !SWIGLU
    // Rows of the tile before the previous one have been read: all threads of the warpgroup passed barriers since.
    pair_rows += (group * 2 + parity) * PAIRS;
    if (thread < PAIRS) pair_rows[thread] = row_0;
    if (PAIRS > 128 && thread + 128 < PAIRS) pair_rows[thread + 128] = row_1;
#endif
    write_outputs<N>(sums, out, tile, limits, staging, pair_rows, buffer);
}

// Takes the stages of a tile whose pairs are all in other blocks of the cluster.
__device__ __forceinline__ void skip_tile(u32 full, u32 empty, Pipeline& at, int steps) {
    for (int step = 0; step < steps; step++) {
        wait_barrier(full + at.slot * 8, at.phase);
        release_stage(empty, at.slot);
        at.advance();
    }
}

extern "C" __global__ void __launch_bounds__(256 + PRODUCER_THREADS, 1)
many_rows(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap input_map, const void* x, const float* input_scales, const float* weight_scales, const u16* bias,
          void* out, float* out_scales, const int* pairs, const PairBlock* blocks, const int* block_count,
          int per_row, int row_bytes, int size, int weight_rows, int steps, int tiles, int row_step, int groups, int input_stride, int output_stride, float limit, float slope) {
    extern __shared__ unsigned char raw[];
    unsigned char* stages = raw + (1024 - shared_address(raw) % 1024) % 1024;
    unsigned char* staging = stages + STAGES * STAGE_BYTES;
    __shared__ __align__(8) u64 full_barriers[STAGES], empty_barriers[STAGES];
    __shared__ Tile ring[TILE_RING];
    __shared__ int pair_rows[SWIGLU ? 1 : 4 * PAIRS];
    __shared__ __align__(16) float scales[FP8 ? STAGES * PAIRS : 4];
    const u32 base = shared_address(stages), full = shared_address(full_barriers), empty = shared_address(empty_barriers);
    const int rank = block_rank();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(full + i * 8), "n"(COPIES ? 1 + PRODUCER_THREADS : 1) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(empty + i * 8), "n"(8 * CLUSTER) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_sync();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    const Work work = {blocks, tiles, *block_count * tiles, (int)blockIdx.x / CLUSTER, (int)gridDim.x / CLUSTER};
    if (threadIdx.x >= 256) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
        const Inputs inputs = {(const unsigned char*)x, input_scales, pairs, per_row, row_bytes, input_stride};
        produce(&weights, &input_map, inputs, work, ring, base, shared_address(scales), full, empty, steps, rank);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CONSUMER_REGISTERS));
        const Outputs outputs = {out, out_scales, size, output_stride};
        const RowParameters parameters = {weight_scales, bias, row_step, groups, weight_rows};
        const GateLimits limits = {limit, slope};
        Pipeline at = {0, 0};
        u32 buffer = 0;
        int sequence = 0;
        for (int number = work.first; number < work.total; number += work.step, sequence++) {
            wait_barrier(full + at.slot * 8, at.phase);
            const Tile tile = ring[sequence % TILE_RING];
#define RUN(n) case n: if constexpr (n <= PAIRS) run_tile<n>(tile, outputs, pairs, parameters, limits, staging, pair_rows, scales, base, full, empty, at, steps, buffer, sequence % 2); break;
            switch ((tile.count + PAIR_STEP - 1) / PAIR_STEP * PAIR_STEP) {
                RUN(16) RUN(32) RUN(48) RUN(64) RUN(80) RUN(96) RUN(112) RUN(128) RUN(144)
                default: skip_tile(full, empty, at, steps);
            }
        }
    }
    __syncwarp();
    // No block exits while others may still write to its shared memory or arrive at its barriers.
    if (CLUSTER > 1) cluster_sync();
}
