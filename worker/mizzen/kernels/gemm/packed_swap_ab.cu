// SPDX-License-Identifier: Apache-2.0
// Swap-AB GEMM over packed quantized weights: out = x * transpose(weight), x and out bfloat16, float32 accumulation.
//
// The wgmma M dimension is weight rows and its N dimension rows of x. Weights go from shared memory to registers, become
// bfloat16 there and are the register operand A; x is the shared-memory operand B.
//
//   grid       (tiles of TILE_ROWS weight rows times BATCH_BLOCKS blocks of BATCH rows of x, SPLIT_K k-splits)
//   cluster    (MULTICAST tiles, all k-splits): the tiles of a k-split load each row of x once by TMA multicast, the
//              k-splits of a tile reduce their sums through distributed shared memory
//   block      1 to 3 consumer WARPGROUPS with a strip of 64 weight rows each, then a producer warpgroup
//              that gives up its registers
//
// A pipeline stage is 128 columns: x in two parts of 64 columns, in the 128-byte swizzle that TMA writes and wgmma reads,
// and the codes, scales and zero points in the fragment layout of fragments.py.
//
// SCALING says where scales are applied:
//   TO_ROWS     to finished sums, one scale per row
//   TO_SUMS     in float32 to the sums of a group (`partial`), which are then added to `sums`
//   TO_WEIGHTS  to the weights, which rounds each to bfloat16 (relative error at most 2^-9, and 2^-9 more unless the
//               scales are bfloat16): for tiles whose registers cannot hold two sets of sums
//
// `wgmma_registers` (N = BATCH), `wait_for_sums`, `fence_fragments`, bf16.cu, hopper.cu and fragments.cu are prepended to
// this text.

#define TO_ROWS 0
#define TO_SUMS 1
#define TO_WEIGHTS 2
#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2

#define WARPGROUPS (TILE_ROWS / 64)
#define CONSUMERS (WARPGROUPS * 128)
#define BATCH_GROUPS (BATCH / 8)
#define TILE_OUTPUTS (SWIGLU ? TILE_ROWS / 2 : TILE_ROWS)
#define PITCH (TILE_OUTPUTS + 8)
#define STAGE_COLUMNS 128
// Columns of 2048 bytes of codes of a strip, and loads of 16 bytes by which a thread gets its codes of a stage.
#define CHUNK_COLUMNS (CODES == UINT4 ? 64 : 32)
#define CHUNKS (STAGE_COLUMNS / CHUNK_COLUMNS)
#define CODE_BYTES (WARPGROUPS * CHUNKS * 2048)
#define INPUT_BYTES (BATCH * STAGE_COLUMNS * 2)
// Groups that a stage touches, and columns that are multiplied before their scale is applied.
#define STAGE_GROUPS (GROUP_COLUMNS % 128 == 0 ? 1 : GROUP_COLUMNS == 32 ? 4 : 2)
#define GRANULE (STAGE_GROUPS == 1 ? 128 : STAGE_GROUPS == 2 ? 64 : 32)
#define HAS_SCALES (SCALING != TO_ROWS)
#define IS_PROMOTED (SCALING == TO_SUMS)
#define GROUP_SCALE_BYTES (SCALE_ROWS * (SCALE_TYPE == FLOAT32 ? 4 : 2))
#define SCALE_BYTES (HAS_SCALES ? WARPGROUPS * STAGE_GROUPS * GROUP_SCALE_BYTES : 0)
#define ZERO_BYTES (HAS_ZEROS ? WARPGROUPS * STAGE_GROUPS * 64 : 0)
// A substep is FRAGMENTS k16 steps: they are converted together, into one of FRAGMENT_SETS sets of registers, and multiplied
// together.
#define FRAGMENT_SETS 2
#define SUBSTEPS (8 / FRAGMENTS)
#define SUBSTEP_COLUMNS (FRAGMENTS * 16)

// Registers of a thread after producer threads have handed some to consumer threads. A single consumer warpgroup on an SM
// needs no more than it has at launch.
// All warpgroups of a block together may have no more than at its launch: 504 or 512, or with two blocks 240 or 256.
#define PRODUCER_REGISTERS (WARPGROUPS == 3 || (WARPGROUPS == 2 && BLOCKS_PER_SM == 2) ? 32 : 40)
#define CONSUMER_REGISTERS (BLOCKS_PER_SM == 2 ? (WARPGROUPS == 1 ? 216 : 104) : WARPGROUPS == 3 ? 160 : 232)
#define MOVES_REGISTERS (WARPGROUPS * BLOCKS_PER_SM > 1)

#define CONSUMER_BARRIER() asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory")

// Shared-memory addresses of the stages' parts and barriers.
struct Pipeline {
    u32 inputs, codes, scales, zeros, full, empty;
};

struct Weight {
    const unsigned char *codes, *scales, *zeros;
    int strips;
};

// Position of a thread block: tile of weight rows, block of x, rank among the blocks that share x, and k-split.
struct Place {
    int tile, batch_block, rank, k_split;
};

// An instruction that one thread of the calling warp executes.
#define ELECTED(instruction) "{\n.reg .pred elected;\nelect.sync _|elected, 0xffffffff;\n@elected " instruction "\n}"

__device__ __forceinline__ Place own_place() {
    const int at = blockIdx.x, rank = at % MULTICAST, pair = at / MULTICAST;
    return {pair / BATCH_BLOCKS * MULTICAST + rank, pair % BATCH_BLOCKS, rank, (int)blockIdx.y};
}

// Loads by one thread of the calling warp.
__device__ __forceinline__ void bulk_load(u32 target, const unsigned char* from, u32 bytes, u32 barrier) {
    asm volatile(
        ELECTED("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;")
        :: "r"(target), "l"(from), "r"(bytes), "r"(barrier), "l"(BATCH_BLOCKS > 1 ? EVICT_NORMAL : EVICT_FIRST) : "memory");
}

// Loads this block's share of a stage of x into every block that shares it, by one thread of the calling warp. Columns
// behind the last become zero.
__device__ __forceinline__ void load_inputs(const TensorMap* map, const Pipeline& at, int slot, int column, Place place) {
    const int row = place.rank * (BATCH / MULTICAST), from = place.batch_block * BATCH + row;
    const u32 barrier = at.full + slot * 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 target = at.inputs + slot * INPUT_BYTES + half * BATCH * 128 + row * 128;
#if MULTICAST > 1
        const u16 mask = ((1 << MULTICAST) - 1) << (place.k_split * MULTICAST);
        asm volatile(
            ELECTED("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
                    "[%0], [%1, {%3, %4}], [%2], %5, %6;")
            :: "r"(target), "l"(map), "r"(barrier), "r"(column + half * 64), "r"(from), "h"(mask), "l"(EVICT_LAST) : "memory");
#else
        asm volatile(
            ELECTED("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                    "[%0], [%1, {%3, %4}], [%2], %5;")
            :: "r"(target), "l"(map), "r"(barrier), "r"(column + half * 64), "r"(from), "l"(EVICT_LAST) : "memory");
#endif
    }
}

// Announces the bytes of a stage, by one thread of the calling warp.
__device__ __forceinline__ void expect_stage(u32 barrier, int chunks, int groups) {
    const u32 bytes = INPUT_BYTES + WARPGROUPS * (chunks * 2048 + groups * (HAS_SCALES * GROUP_SCALE_BYTES + HAS_ZEROS * 64));
    asm volatile(ELECTED("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;") :: "r"(barrier), "r"(bytes) : "memory");
}

// Loads codes, scales and zero points of a stage and of the strip that producer warp `warp` is to load; the first warp
// announces the bytes of all. The last stage may have 64 columns; the codes behind them are stale, and are multiplied with
// zeros. Tiles behind the last strip load the last strip.
__device__ __forceinline__ void load_weights(const Weight& weight, const Pipeline& at, int slot, int column, Place place, int warp) {
    const int chunks = min(CHUNKS, (COLUMNS - column) / CHUNK_COLUMNS), group = column / GROUP_COLUMNS;
    const int groups = min(STAGE_GROUPS, GROUPS - group);
    const u32 barrier = at.full + slot * 8;
    const size_t strip = min(place.tile * WARPGROUPS + warp, weight.strips - 1);
    if (warp == 0) expect_stage(barrier, chunks, groups);
    bulk_load(at.codes + slot * CODE_BYTES + warp * CHUNKS * 2048,
        weight.codes + (strip * (COLUMNS / CHUNK_COLUMNS) + column / CHUNK_COLUMNS) * 2048, chunks * 2048, barrier);
    if (HAS_SCALES)
        bulk_load(at.scales + slot * SCALE_BYTES + warp * STAGE_GROUPS * GROUP_SCALE_BYTES,
            weight.scales + (strip * GROUPS + group) * GROUP_SCALE_BYTES, groups * GROUP_SCALE_BYTES, barrier);
    if (HAS_ZEROS)
        bulk_load(at.zeros + slot * ZERO_BYTES + warp * STAGE_GROUPS * 64, weight.zeros + (strip * GROUPS + group) * 64, groups * 64, barrier);
}

// Producer warp: loads its part of every stage, a strip or x, as soon as the stage is free. The weights of the first stages
// are already in flight. One thread would be too slow for all parts.
__device__ __forceinline__ void produce_stages(const TensorMap* inputs, const Weight& weight, const Pipeline& at, Place place, int first, int steps, int warp) {
    for (int i = 0; i < steps; i++) {
        const int slot = i % STAGES, column = (first + i) * STAGE_COLUMNS;
        if (i >= STAGES) {
            wait_barrier(at.empty + slot * 8, (i / STAGES - 1) & 1);
            if (warp < WARPGROUPS) load_weights(weight, at, slot, column, place, warp);
        }
        if (warp == 3) load_inputs(inputs, at, slot, column, place);
    }
}

// What a thread's rows (lane / 4 and 8 below it) subtract from codes, and multiply to them (each twice in a word).
struct Factors {
    ZeroPair zeros;
    u32 scales[2];
};

// Index of the first of the two adjacent entries of a thread's rows, in a group's entries for 64 rows or for 8 octets.
__device__ __forceinline__ int row_index(int entries) {
    return (entries == 64 ? threadIdx.x % 32 / 4 * 8 : 0) + threadIdx.x / 32 % 4 * 2;
}

// Scales of a thread's rows in a group of the stage.
__device__ __forceinline__ float2 load_scales(const Pipeline& at, int slot, int group) {
    const u32 address = at.scales + slot * SCALE_BYTES + (threadIdx.x / 128 * STAGE_GROUPS + group) * GROUP_SCALE_BYTES;
    float2 scales;
    u32 both;
    if (SCALE_TYPE == FLOAT32) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(scales.x), "=f"(scales.y) : "r"(address + row_index(SCALE_ROWS) * 4));
        return scales;
    }
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(both) : "r"(address + row_index(SCALE_ROWS) * 2));
    if (SCALE_TYPE == BFLOAT16) return make_float2(bf16_low(both), bf16_high(both));
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(scales.x), "=f"(scales.y) : "r"(both));
    return scales;
}

// Group among those of the stage that columns from `offset` on belong to. Columns behind the last belong to the last.
__device__ __forceinline__ int group_in_stage(int column, int offset) {
    if (STAGE_GROUPS == 1) return 0;
    const int first = column / GROUP_COLUMNS;
    return min((column + offset) / GROUP_COLUMNS, GROUPS - 1) - first;
}

__device__ __forceinline__ Factors load_factors(const Pipeline& at, int slot, int group) {
    Factors factors = {{0x43084308, 0x43084308}};
#if HAS_ZEROS
    const int index = (threadIdx.x / 128 * STAGE_GROUPS + group) * 64 + row_index(64);
    u32 both;
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(both) : "r"(at.zeros + slot * ZERO_BYTES + index));
    factors.zeros = convert_zeros(both);
#endif
#if SCALING == TO_WEIGHTS
    const float2 scales = load_scales(at, slot, group);
    factors.scales[0] = pack_bf16x2(scales.x, scales.x);
    factors.scales[1] = pack_bf16x2(scales.y, scales.y);
#endif
    return factors;
}

// Adds the scaled sums of a group.
__device__ __forceinline__ void promote(float* sums, const float* partial, float2 scale) {
#pragma unroll
    for (int i = 0; i < BATCH / 2; i++) sums[i] = fmaf(partial[i], i % 4 < 2 ? scale.x : scale.y, sums[i]);
}

__device__ __forceinline__ void load_codes(u32* codes, const Pipeline& at, int slot) {
    const u32 address = at.codes + slot * CODE_BYTES + threadIdx.x / 128 * CHUNKS * 2048 + threadIdx.x % 128 * 16;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(codes[i * 4]), "=r"(codes[i * 4 + 1]), "=r"(codes[i * 4 + 2]), "=r"(codes[i * 4 + 3]) : "r"(address + i * 2048));
}

// Releases a stage to every block that writes to it; the last stages are not released, because no load waits for them.
__device__ __forceinline__ void release_stage(const Pipeline& at, int i, int steps) {
    const int lane = threadIdx.x % 32;
    if (i + STAGES < steps && lane < MULTICAST)
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];"
            :: "r"(map_to_rank(at.empty + i % STAGES * 8, blockIdx.y * MULTICAST + lane)) : "memory");
}

// Waits for a stage and loads its codes.
__device__ __forceinline__ void open_stage(u32* codes, const Pipeline& at, int i) {
    wait_barrier(at.full + i % STAGES * 8, (i / STAGES) & 1);
    load_codes(codes, at, i % STAGES);
}

// Converts the fragments of substep `s` of stage `i`.
__device__ __forceinline__ void convert_substep(u32* fragments, const u32* codes, Factors& factors, const Pipeline& at, int first, int i, int s) {
    const int offset = s * SUBSTEP_COLUMNS;
    if (offset % GRANULE == 0)
        factors = load_factors(at, i % STAGES, group_in_stage((first + i) * STAGE_COLUMNS, offset));
#pragma unroll
    for (int k = 0; k < FRAGMENTS; k++) convert_fragment(fragments + k * 4, codes, s * FRAGMENTS + k, factors.zeros);
#pragma unroll
    for (int i = 0; SCALING == TO_WEIGHTS && i < FRAGMENTS * 4; i++) fragments[i] = multiply_bf16x2(fragments[i], factors.scales[i % 2]);
}

// Multiplies all stages. While the tensor cores multiply a substep, the next one is converted.
//
// No register of a wgmma in flight is touched: a set of fragments is written again after the wait for the substep before
// the last, and `partial` is read after the wait for all. Otherwise the compiler would wait after every wgmma.
__device__ __forceinline__ void multiply_all_stages(float* sums, const Pipeline& at, int first, int steps) {
    u32 fragments[FRAGMENT_SETS][FRAGMENTS * 4], codes[CHUNKS * 4];
    float partial[IS_PROMOTED ? BATCH / 2 : 1];
    float2 scale = make_float2(0, 0);
    Factors factors;
#pragma unroll
    for (int i = 0; i < BATCH / 2; i++) {
        sums[i] = 0;
        if (IS_PROMOTED) partial[i] = 0;
    }
    open_stage(codes, at, 0);
    convert_substep(fragments[0], codes, factors, at, first, 0, 0);
    for (int i = 0; i < steps; i++) {
        const int slot = i % STAGES;
#pragma unroll
        for (int s = 0; s < SUBSTEPS; s++) {
            const int offset = s * SUBSTEP_COLUMNS, is_last = s == SUBSTEPS - 1;
            u32* own = fragments[s % FRAGMENT_SETS];
#if IS_PROMOTED
            if (offset % GRANULE == 0) {
                wait_for_sums(partial);
                promote(sums, partial, scale);
                scale = load_scales(at, slot, group_in_stage((first + i) * STAGE_COLUMNS, offset));
            }
#endif
            const u64 right = smem_descriptor(at.inputs + slot * INPUT_BYTES + offset / 64 * BATCH * 128) + offset % 64 / 8;
            fence_fragments(own);
#pragma unroll
            for (int k = 0; k < FRAGMENTS; k++)
                wgmma_registers(IS_PROMOTED ? partial : sums, own + k * 4, right + k * 2, !IS_PROMOTED || offset % GRANULE || k);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (is_last && i + 1 < steps) open_stage(codes, at, i + 1);
            asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(FRAGMENT_SETS - 1) : "memory");
            if (s == FRAGMENT_SETS - 2 && i) release_stage(at, i - 1, steps);
            // Behind the last stage, this converts codes that are not multiplied.
            convert_substep(fragments[(s + 1) % FRAGMENT_SETS], codes, factors, at, first, i + is_last, (s + 1) % SUBSTEPS);
        }
    }
#if IS_PROMOTED
    wait_for_sums(partial);
    promote(sums, partial, scale);
#else
    wait_for_sums(sums);
#endif
}

// Multiplies sums with the scales of their rows, which are laid out as the packed rows.
__device__ __forceinline__ void scale_rows(float* sums, const float* scales, int strips, int tile) {
    const int strip = min(tile * WARPGROUPS + (int)threadIdx.x / 128, strips - 1);
    const int row = strip * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const float low = scales[row], high = scales[row + 8];
#pragma unroll
    for (int i = 0; i < BATCH / 2; i++) sums[i] *= i % 4 < 2 ? low : high;
}

// Writes sums to `out` [count, outputs] through the shared memory of the stages, which are no longer read.
__device__ __forceinline__ void write_outputs(const float* sums, unsigned char* stages, Place place, u16* out, int outputs, int count) {
    const int first = place.k_split * BATCH_GROUPS / SPLIT_K, last = (place.k_split + 1) * BATCH_GROUPS / SPLIT_K;
    unsigned char* staging = stages + (SPLIT_K > 1 ? TILE_ROWS * BATCH * 4 : 0);
    const u32 staging_address = shared_address(staging);
    CONSUMER_BARRIER();
#if SPLIT_K > 1
    float4* own_sums = (float4*)stages + threadIdx.x;
#pragma unroll
    for (int group = 0; group < BATCH_GROUPS; group++) own_sums[group * CONSUMERS] = *(const float4*)(sums + group * 4);
    cluster_sync();
    for (int group = first; group < last; group++) reduce_splits<SPLIT_K, MULTICAST>(own_sums + group * CONSUMERS, staging_address, PITCH, group - first, threadIdx.x / 32, place.rank);
#else
#pragma unroll
    for (int group = 0; group < BATCH_GROUPS; group++)
        stage_outputs(staging_address, PITCH, group, threadIdx.x / 32, threadIdx.x % 32, sums + group * 4);
#endif
    CONSUMER_BARRIER();
    for (int i = threadIdx.x; i < (last - first) * TILE_OUTPUTS; i += CONSUMERS) {
        const int row = i / (TILE_OUTPUTS / 8), at = i % (TILE_OUTPUTS / 8) * 8;
        const int to = place.batch_block * BATCH + first * 8 + row, column = place.tile * TILE_OUTPUTS + at;
        if (to < count && column < outputs)
            *(uint4*)(out + (size_t)to * outputs + column) = *(const uint4*)(staging + row * PITCH * 2 + at * 2);
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, BLOCKS_PER_SM)
packed_swap_ab(const __grid_constant__ TensorMap inputs, const unsigned char* codes, const unsigned char* scales, const unsigned char* zeros, u16* out, int strips, int outputs, int count) {
    extern __shared__ unsigned char raw[];
    unsigned char* stages = raw + (1024 - shared_address(raw) % 1024) % 1024;
    __shared__ __align__(8) u64 full_barriers[STAGES], empty_barriers[STAGES];
    const Place place = own_place();
    const Weight weight = {codes, scales, zeros, strips};
    const u32 base = shared_address(stages);
    const Pipeline at = {
        base, base + STAGES * INPUT_BYTES, base + STAGES * (INPUT_BYTES + CODE_BYTES),
        base + STAGES * (INPUT_BYTES + CODE_BYTES + SCALE_BYTES), shared_address(full_barriers), shared_address(empty_barriers)};
    // Uniform in a warp, for the compiler as well.
    const int producer_warp = __shfl_sync(0xffffffff, (int)threadIdx.x / 32, 0) - CONSUMERS / 32;
    // Stages of this k-split; counts differ by one if the stages do not divide evenly.
    const int all_steps = (COLUMNS + STAGE_COLUMNS - 1) / STAGE_COLUMNS;
    const int first = place.k_split * all_steps / SPLIT_K, steps = (place.k_split + 1) * all_steps / SPLIT_K - first;
#if !DEFER_PDL
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    if (producer_warp >= 0) {
        if (threadIdx.x == CONSUMERS) {
            for (int i = 0; i < STAGES; i++) {
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at.full + i * 8) : "memory");
                asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at.empty + i * 8), "n"(WARPGROUPS * 4 * MULTICAST) : "memory");
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        asm volatile("bar.sync 2, 128;" ::: "memory");
        // Weights do not depend on the previous kernel, so their loads start before the PDL wait.
        if (producer_warp < WARPGROUPS)
            for (int i = 0; i < STAGES && i < steps; i++) load_weights(weight, at, i, (first + i) * STAGE_COLUMNS, place, producer_warp);
    }
    __syncthreads();
    if (MULTICAST * SPLIT_K > 1) cluster_sync_relaxed();
    // PDL wait: outputs of earlier kernels are neither read nor overwritten before this point.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x >= CONSUMERS) {
#if MOVES_REGISTERS
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
#endif
        if (producer_warp < WARPGROUPS || producer_warp == 3) produce_stages(&inputs, weight, at, place, first, steps, producer_warp);
        __syncwarp();
        if (SPLIT_K > 1) cluster_sync();
    } else {
#if MOVES_REGISTERS
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CONSUMER_REGISTERS));
#endif
        __align__(16) float sums[BATCH / 2];
        multiply_all_stages(sums, at, first, steps);
        // With DEFER_PDL nothing triggers the next kernel: its blocks start together when these blocks have ended.
        if (SCALING == TO_ROWS) scale_rows(sums, (const float*)scales, strips, place.tile);
        write_outputs(sums, stages, place, out, outputs, count);
    }
    // No block exits while others may still arrive at its barriers or read its sums.
    if (MULTICAST * SPLIT_K > 1) cluster_sync_relaxed();
}
