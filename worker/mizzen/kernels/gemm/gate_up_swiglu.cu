// SPDX-License-Identifier: Apache-2.0
// Fused gate-up GEMM with SwiGLU for large M: silu(x * gate^T) * (x * up^T), bfloat16 with float32 accumulation.
//
// The wgmma M dimension is weight rows, eight gate rows alternating with their eight up rows; N is rows of x.
//
//   cluster    CLUSTER_SIZE (2) blocks with a tile of TILE_ROWS (128) weight rows each; both get each row of x by multicast
//   block      two consumer warpgroups of 64 weight rows, then a producer warpgroup that gives up its registers;
//              persistent: it computes one item (a tile times BATCH (256) rows of x) after another
//   order      TILE_GROUP pairs of tiles for all blocks of x, then the next pairs, so that concurrent clusters find
//              one another's operands in L2
//
// Pipeline stages are laid out as in swap_ab.cu. Outputs pass through a staging area of their own, PASS_ROWS rows of x at a
// time, in two alternating halves: between reading a half and writing it again lies a barrier of all consumers.

#define WARPGROUPS (TILE_ROWS / 64)
#define CONSUMERS (WARPGROUPS * 128)
#define WEIGHT_BYTES (TILE_ROWS * 128)
#define STAGE_BYTES (WEIGHT_BYTES + BATCH * 128)
#define TILE_OUTPUTS (TILE_ROWS / 2)
#define PITCH (TILE_OUTPUTS + 8)
#define PASS_ROWS 64

struct TileIndex {
    int tile, block;
};

// Tile of weight rows and block of x that this thread block computes in an item of its cluster.
__device__ __forceinline__ TileIndex tile_of_item(int item, int pairs, int blocks) {
    const int group = item / (TILE_GROUP * blocks), within = item % (TILE_GROUP * blocks);
    const int width = min(TILE_GROUP, pairs - group * TILE_GROUP);
    return {(group * TILE_GROUP + within % width) * CLUSTER_SIZE + (int)blockIdx.x % CLUSTER_SIZE, within / width};
}

// Loads half of a block of x into both thread blocks of the cluster.
__device__ __forceinline__ void tma_load_inputs(const TensorMap* map, u32 to, u32 barrier, int column, int block) {
    const int row = blockIdx.x % CLUSTER_SIZE * (BATCH / CLUSTER_SIZE);
    const u16 mask = (1 << CLUSTER_SIZE) - 1;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;"
        :: "r"(to + row * 128), "l"(map), "r"(barrier), "r"(column), "r"(block * BATCH + row), "h"(mask) : "memory");
}

// Producer: loads the stages of all items, each as soon as it is free in both thread blocks.
__device__ __forceinline__ void produce_stages(const TensorMap* weights, const TensorMap* inputs, u32 base, u32 full, u32 empty, int steps, int pairs, int blocks) {
    int i = 0;
    for (int item = blockIdx.x / CLUSTER_SIZE; item < pairs * blocks; item += gridDim.x / CLUSTER_SIZE) {
        const TileIndex at = tile_of_item(item, pairs, blocks);
        for (int step = 0; step < steps; step++, i++) {
            const u32 slot = i % STAGES, to = base + slot * STAGE_BYTES, ready = full + slot * 8;
            if (i >= STAGES) wait_barrier(empty + slot * 8, (i / STAGES - 1) & 1);
            expect_bytes(ready, STAGE_BYTES);
            tma_load_weights(weights, to, ready, step * 64, at.tile * TILE_ROWS, EVICT_NORMAL);
            tma_load_inputs(inputs, to + WEIGHT_BYTES, ready, step * 64, at.block);
        }
    }
}

// Releases a stage in both thread blocks; the last stages are not released, because no load waits for them.
__device__ __forceinline__ void release_stage(u32 empty, int i, int total) {
    const int lane = threadIdx.x % 32;
    if (i + STAGES < total && lane < CLUSTER_SIZE)
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];"
            :: "r"(map_to_rank(empty + i % STAGES * 8, lane)) : "memory");
}

// Waits for a stage and multiplies it with both halves of x; `add` is false for the first stage of an item.
__device__ __forceinline__ void multiply_stage(float* first, float* second, u32 base, u32 full, int i, bool add) {
    const u32 at = base + i % STAGES * STAGE_BYTES;
    wait_barrier(full + i % STAGES * 8, (i / STAGES) & 1);
    const u64 left = smem_descriptor(at + threadIdx.x / 128 * 64 * 128), right = smem_descriptor(at + WEIGHT_BYTES);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++) {
        wgmma_half(first, left + k * 2, right + k * 2, add || k);
        wgmma_half(second, left + k * 2, right + BATCH / 2 * 128 / 16 + k * 2, add || k);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Multiplies a stage with one half of x; the first half waits for the stage.
__device__ __forceinline__ void multiply_half_stage(float* sums, u32 base, u32 full, int i, int half) {
    const u32 at = base + i % STAGES * STAGE_BYTES;
    if (!half) wait_barrier(full + i % STAGES * 8, (i / STAGES) & 1);
    const u64 left = smem_descriptor(at + threadIdx.x / 128 * 64 * 128);
    const u64 right = smem_descriptor(at + WEIGHT_BYTES + half * BATCH / 2 * 128);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_half(sums, left + k * 2, right + k * 2, 1);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Writes the outputs of PASS_ROWS rows of x to `out` [count, size]; two passes are half of a block of x.
__device__ __forceinline__ void write_pass(const float* sums, int pass, unsigned char* staging, TileIndex at, u16* out, int size, int count) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned char* half = staging + pass % 2 * (PASS_ROWS * PITCH * 2);
#pragma unroll
    for (int group = 0; group < PASS_ROWS / 8; group++)
        stage_outputs(shared_address(half), PITCH, group, warp, lane, sums + (pass % 2 * PASS_ROWS / 8 + group) * 4);
    asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory");
    for (int i = threadIdx.x; i < PASS_ROWS * TILE_OUTPUTS / 8; i += CONSUMERS) {
        const int row = i / (TILE_OUTPUTS / 8), column = i % (TILE_OUTPUTS / 8) * 8;
        const int to = at.block * BATCH + pass * PASS_ROWS + row, from = at.tile * TILE_OUTPUTS + column;
        if (to < count && from < size)
            *(uint4*)(out + (size_t)to * size + from) = *(const uint4*)(half + row * PITCH * 2 + column * 2);
    }
}

// Multiplies the stages of an item (`i` is its first; there are more than STAGES) and writes the outputs.
//
// The last STAGES stages are multiplied with the first half of x and then with the second, so that the outputs of
// the first half are written while the second half is multiplied.
//
//   tensor cores   | all of x | .. | all of x | first half, 4 stages | second half, 4 stages |           | all ..
//   outputs        |                                                 | first half            | second half |
//   TMA            | as stages become free ..                                     | the next item's stages    ..
__device__ __forceinline__ void multiply_item(u32 base, u32 full, u32 empty, int i, int steps, int total, unsigned char* staging, TileIndex at, u16* out, int size, int count) {
    // Two arrays: if halves of one array were used separately, the compiler would wait for all wgmma groups.
    float first[BATCH / 4], second[BATCH / 4];
    const int end = i + steps - STAGES;
    multiply_stage(first, second, base, full, i, false);
    for (i++; i < end; i++) {
        multiply_stage(first, second, base, full, i, true);
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        release_stage(empty, i - 1, total);
    }
    multiply_half_stage(first, base, full, i, 0);
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    release_stage(empty, i - 1, total);
#pragma unroll
    for (int j = 1; j < STAGES; j++) multiply_half_stage(first, base, full, i + j, 0);
#pragma unroll
    for (int j = 0; j < STAGES; j++) multiply_half_stage(second, base, full, i + j, 1);
    // Wait for all wgmma groups except those of the second half.
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(STAGES) : "memory");
    write_pass(first, 0, staging, at, out, size, count);
    write_pass(first, 1, staging, at, out, size, count);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int j = 0; j < STAGES; j++) release_stage(empty, i + j, total);
    write_pass(second, 2, staging, at, out, size, count);
    write_pass(second, 3, staging, at, out, size, count);
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)
gate_up_swiglu(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs, u16* out, int size, int count, int steps, int pairs, int blocks) {
    extern __shared__ unsigned char raw[];
    unsigned char* stages = raw + (1024 - shared_address(raw) % 1024) % 1024;
    __shared__ __align__(8) u64 full_barriers[STAGES], empty_barriers[STAGES];
    const u32 base = shared_address(stages), full = shared_address(full_barriers), empty = shared_address(empty_barriers);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + i * 8) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(empty + i * 8), "n"(WARPGROUPS * 4 * CLUSTER_SIZE) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_sync_relaxed();
    // PDL wait: outputs of earlier kernels are neither read nor overwritten before this point.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (threadIdx.x == CONSUMERS) produce_stages(&weights, &inputs, base, full, empty, steps, pairs, blocks);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(232));
        const int first = blockIdx.x / CLUSTER_SIZE, stride = gridDim.x / CLUSTER_SIZE, items = pairs * blocks;
        const int total = (items - first + stride - 1) / stride * steps;
        unsigned char* staging = stages + STAGES * STAGE_BYTES;
        for (int item = first, i = 0; item < items; item += stride, i += steps)
            multiply_item(base, full, empty, i, steps, total, staging, tile_of_item(item, pairs, blocks), out, size, count);
    }
    // No block exits while the other may still write to its shared memory and barriers.
    cluster_sync_relaxed();
}
