// SPDX-License-Identifier: Apache-2.0
// Swap-AB GEMM for small batches: out = x * transpose(weight), bfloat16 with float32 accumulation.
//
// The wgmma M dimension is weight rows and its N dimension the batch, so any batch up to 256 fills the tensor cores.
//
//   grid       (tiles of TILE_ROWS weight rows, SPLIT_K k-splits)
//   cluster    (MULTICAST tiles, all k-splits): the tiles of a k-split load each row of x once by TMA multicast, the
//              k-splits of a tile reduce their sums through distributed shared memory
//   block      1 or 2 consumer WARPGROUPS of 64 weight rows each, then a producer warpgroup that gives up its registers;
//              with 192 rows, both consumers compute the last 64 rows, each for half of the batch
//
// With BIAS, and without SWIGLU, the first k-split adds bias [rows] to its sums, before they are rounded.
//
// A pipeline stage is 64 columns of both operands, in the 128-byte swizzle that TMA writes and wgmma reads.
// `wgmma` (N = BATCH), `wgmma_half`, bf16.cu and hopper.cu are prepended to this text.

#define WARPGROUPS (TILE_ROWS == 64 ? 1 : 2)
#define HAS_EXTRA_ROWS (TILE_ROWS == 192)
#define WEIGHT_BYTES (TILE_ROWS * 128)
#define STAGE_BYTES (WEIGHT_BYTES + BATCH * 128)
#define BATCH_GROUPS (BATCH / 8)
#define CONSUMERS (WARPGROUPS * 128)
#define TILE_OUTPUTS (SWIGLU ? TILE_ROWS / 2 : TILE_ROWS)
#define PITCH (TILE_OUTPUTS + 8)

#define CONSUMER_BARRIER() asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory")

// First column of a step's stage. Tiles start at different columns, so that the same columns of all rows, which are
// powers of two apart, do not hit few memory channels at once. It made no measurable difference.
__device__ __forceinline__ int stage_column(int step, int first, int steps) {
    return (first + (step + blockIdx.x / MULTICAST * ROTATE) % steps) * 64;
}

// Producer: loads every stage as soon as it is free. The first weights are already in flight.
__device__ __forceinline__ void produce_stages(const TensorMap* weights, const TensorMap* inputs, u32 base, u32 full, u32 empty, int first, int steps) {
    const int tile = blockIdx.x, k_split = blockIdx.y;
    for (int i = 0; i < steps; i++) {
        const int slot = i % STAGES, column = stage_column(i, first, steps);
        const u32 target = base + slot * STAGE_BYTES, ready = full + slot * 8;
        if (i >= STAGES) {
            wait_barrier(empty + slot * 8, (i / STAGES - 1) & 1);
            expect_bytes(ready, STAGE_BYTES);
            tma_load_weights(weights, target, ready, column, tile * TILE_ROWS, EVICT_FIRST);
        }
        tma_load_shared_inputs<BATCH, MULTICAST>(inputs, target + WEIGHT_BYTES, ready, column, tile % MULTICAST, k_split);
    }
}

// Waits for one stage and multiplies it; `add` is false for the first stage.
__device__ __forceinline__ void multiply_stage(float* sums, float* extra, u32 base, u32 full, int i, bool add) {
    const int slot = i % STAGES, warpgroup = threadIdx.x / 128;
    const u32 address = base + slot * STAGE_BYTES;
    wait_barrier(full + slot * 8, (i / STAGES) & 1);
    const u64 left = smem_descriptor(address + warpgroup * 64 * 128), right = smem_descriptor(address + WEIGHT_BYTES);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++) {
        wgmma(sums, left + k * 2, right + k * 2, add || k);
#if HAS_EXTRA_ROWS
        const u64 below = smem_descriptor(address + 128 * 128), half = smem_descriptor(address + WEIGHT_BYTES + warpgroup * BATCH * 64);
        wgmma_half(extra, below + k * 2, half + k * 2, add || k);
#endif
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Multiplies all stages, and releases each to every block that writes to it.
__device__ __forceinline__ void multiply_all_stages(float* sums, float* extra, u32 base, u32 full, u32 empty, int steps) {
    const int lane = threadIdx.x % 32;
    multiply_stage(sums, extra, base, full, 0, false);
    for (int i = 1; i < steps; i++) {
        multiply_stage(sums, extra, base, full, i, true);
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (i - 1 + STAGES < steps && lane < MULTICAST) {
            const u32 before = (i - 1) % STAGES, peer = blockIdx.y * MULTICAST + lane;
            asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];"
                :: "r"(map_to_rank(empty + before * 8, peer)) : "memory");
        }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

#if BIAS
// Adds the biases of this thread's two weight rows, which lie eight rows apart, to the sums of `groups` batch groups.
__device__ __forceinline__ void add_biases(float* sums, const float* biases, int groups) {
#pragma unroll
    for (int group = 0; group < groups; group++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[group * 4 + i] += biases[i / 2];
}
#endif

__device__ __forceinline__ float4 load_float4(const float* sums) { return make_float4(sums[0], sums[1], sums[2], sums[3]); }

// Writes sums to `out` through the shared memory of the stages, which are no longer read.
__device__ __forceinline__ void write_outputs(const float* sums, const float* extra, unsigned char* stages, u16* out, int rows, int count) {
    const int tile = blockIdx.x, k_split = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Rows 128 to 191: this warp's position among them, and the first batch group (of 8 rows) that it computes.
    const int extra_warp = 8 + warp % 4, first_group = warp / 4 * (BATCH_GROUPS / 2);
    const int first = k_split * BATCH_GROUPS / SPLIT_K, last = (k_split + 1) * BATCH_GROUPS / SPLIT_K;
    unsigned char* staging = stages + (SPLIT_K > 1 ? TILE_ROWS * BATCH * 4 : 0);
    const u32 staging_address = shared_address(staging);
    CONSUMER_BARRIER();
#if SPLIT_K > 1
    float4* own_sums = (float4*)stages + threadIdx.x;
#pragma unroll
    for (int group = 0; group < BATCH_GROUPS; group++) own_sums[group * CONSUMERS] = load_float4(sums + group * 4);
#pragma unroll
    for (int group = 0; HAS_EXTRA_ROWS && group < BATCH_GROUPS / 2; group++) own_sums[(BATCH_GROUPS + group) * CONSUMERS] = load_float4(extra + group * 4);
    cluster_sync();
    for (int group = first; group < last; group++) {
        reduce_splits<SPLIT_K, MULTICAST>(own_sums + group * CONSUMERS, staging_address, PITCH, group - first, warp, blockIdx.x % MULTICAST);
        if (HAS_EXTRA_ROWS && group >= first_group && group < first_group + BATCH_GROUPS / 2)
            reduce_splits<SPLIT_K, MULTICAST>(own_sums + (BATCH_GROUPS + group - first_group) * CONSUMERS, staging_address, PITCH, group - first, extra_warp, blockIdx.x % MULTICAST);
    }
#else
#pragma unroll
    for (int group = 0; group < BATCH_GROUPS; group++) stage_outputs(staging_address, PITCH, group, warp, lane, sums + group * 4);
#pragma unroll
    for (int group = 0; HAS_EXTRA_ROWS && group < BATCH_GROUPS / 2; group++) stage_outputs(staging_address, PITCH, first_group + group, extra_warp, lane, extra + group * 4);
#endif
    CONSUMER_BARRIER();
    for (int i = threadIdx.x; i < (last - first) * TILE_OUTPUTS; i += CONSUMERS) {
        const int row = i / (TILE_OUTPUTS / 8), column = i % (TILE_OUTPUTS / 8) * 8, batch_row = first * 8 + row;
        if (batch_row < count && tile * TILE_OUTPUTS + column < rows)
            *(uint4*)(out + (size_t)batch_row * rows + tile * TILE_OUTPUTS + column) = *(const uint4*)(staging + row * PITCH * 2 + column * 2);
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)
swap_ab(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs, u16* out, int rows, int count, int all_steps
#if BIAS
    , const u16* bias
#endif
) {
    extern __shared__ unsigned char raw[];
    unsigned char* stages = raw + (1024 - shared_address(raw) % 1024) % 1024;
    __shared__ __align__(8) u64 full_barriers[STAGES], empty_barriers[STAGES];
    const u32 base = shared_address(stages), full = shared_address(full_barriers), empty = shared_address(empty_barriers);
    const bool is_producer = threadIdx.x == CONSUMERS;
    // Stages of this k-split; counts differ by one if the stages do not divide evenly.
    const int first = blockIdx.y * all_steps / SPLIT_K, steps = (blockIdx.y + 1) * all_steps / SPLIT_K - first;
#if !DEFER_PDL
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    if (is_producer) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + i * 8) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(empty + i * 8), "n"(WARPGROUPS * 4 * MULTICAST) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        // Weights do not depend on the previous kernel, so their loads start before the PDL wait.
        for (int i = 0; i < STAGES && i < steps; i++) {
            expect_bytes(full + i * 8, STAGE_BYTES);
            tma_load_weights(&weights, base + i * STAGE_BYTES, full + i * 8, stage_column(i, first, steps), blockIdx.x * TILE_ROWS, EVICT_FIRST);
        }
    }
    __syncthreads();
    if (MULTICAST * SPLIT_K > 1) cluster_sync_relaxed();
#if BIAS
    float biases[4];  // of this thread's weight rows; the last two belong to `extra`
#pragma unroll
    for (int i = 0; i < (HAS_EXTRA_ROWS ? 4 : 2); i++) {
        const int warp = threadIdx.x / 32, tile_row = (i < 2 ? warp : 8 + warp % 4) * 16 + i % 2 * 8 + threadIdx.x % 32 / 4;
        const int row = blockIdx.x * TILE_ROWS + tile_row;
        biases[i] = blockIdx.y == 0 && row < rows ? bf16_low(bias[row]) : 0;
    }
#endif
    // PDL wait: outputs of earlier kernels are neither read nor overwritten before this point.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (is_producer) produce_stages(&weights, &inputs, base, full, empty, first, steps);
        __syncwarp();
        if (SPLIT_K > 1) cluster_sync();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(232));
        float sums[BATCH / 2], extra[HAS_EXTRA_ROWS ? BATCH / 4 : 1];
        multiply_all_stages(sums, extra, base, full, empty, steps);
#if BIAS
        add_biases(sums, biases, BATCH_GROUPS);
        if (HAS_EXTRA_ROWS) add_biases(extra, biases + 2, BATCH_GROUPS / 2);
#endif
#if DEFER_PDL
        asm volatile("griddepcontrol.launch_dependents;");
#endif
        write_outputs(sums, extra, stages, out, rows, count);
    }
    // No block exits while others may still arrive at its barriers or read its sums.
    if (MULTICAST * SPLIT_K > 1) cluster_sync_relaxed();
}
