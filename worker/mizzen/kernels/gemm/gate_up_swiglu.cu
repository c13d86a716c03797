// silu(gates) * others of many rows, bfloat16, sums in float32: both are products with the same x.
//
// The tensor cores' M is weight rows, eight gates and the eight rows beside them in turn, and their N rows of x.
//
//   cluster    two blocks (SHARE) with a tile of 128 weight rows (ROWS) each; they fetch each row of x once for both
//   block      two warp groups of 64 weight rows, then one that feeds them and leaves them its registers;
//              it takes a tile and a block of 256 rows of x (BATCH) after the other
//   order      GROUP pairs of tiles by all blocks of x, then the next pairs: what clusters fetch at a time is
//              in the second-level cache for the others
//
// A stage of the pipeline is as in `wide.cu`. Outputs go through an area of their own, PASS rows of x at a time
// and in two halves by turns: who writes to one has met all others since they read it.

#define WARPGROUPS (ROWS / 64)
#define CONSUMERS (WARPGROUPS * 128)
#define WEIGHT_BYTES (ROWS * 128)
#define STAGE_BYTES (WEIGHT_BYTES + BATCH * 128)
#define WIDTH (ROWS / 2)
#define PITCH (WIDTH + 8)
#define PASS 64

struct Place {
    int tile, block;
};

// The tile of weight rows and the block of x that are a block's in an item of its cluster.
__device__ __forceinline__ Place place(int item, int pairs, int blocks) {
    const int group = item / (GROUP * blocks), within = item % (GROUP * blocks);
    const int width = min(GROUP, pairs - group * GROUP);
    return {(group * GROUP + within % width) * SHARE + (int)blockIdx.x % SHARE, within / width};
}

// Fetches half of a block of x for both blocks of the cluster.
__device__ __forceinline__ void fetch_inputs(const TensorMap* map, u32 to, u32 barrier, int column, int block) {
    const int row = blockIdx.x % SHARE * (BATCH / SHARE);
    const u16 mask = (1 << SHARE) - 1;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;"
        :: "r"(to + row * 128), "l"(map), "r"(barrier), "r"(column), "r"(block * BATCH + row), "h"(mask) : "memory");
}

// Brings the stages of all items, each as soon as it is free in both blocks.
__device__ __forceinline__ void feed(const TensorMap* weights, const TensorMap* inputs, u32 base, u32 full, u32 empty, int steps, int pairs, int blocks) {
    int i = 0;
    for (int item = blockIdx.x / SHARE; item < pairs * blocks; item += gridDim.x / SHARE) {
        const Place at = place(item, pairs, blocks);
        for (int step = 0; step < steps; step++, i++) {
            const u32 slot = i % STAGES, to = base + slot * STAGE_BYTES, ready = full + slot * 8;
            if (i >= STAGES) wait(empty + slot * 8, (i / STAGES - 1) & 1);
            expect(ready, STAGE_BYTES);
            fetch_weights(weights, to, ready, step * 64, at.tile * ROWS, USUAL);
            fetch_inputs(inputs, to + WEIGHT_BYTES, ready, step * 64, at.block);
        }
    }
}

// Tells both blocks that a stage is read, unless it is among the last, for which nobody waits.
__device__ __forceinline__ void release(u32 empty, int i, int total) {
    const int lane = threadIdx.x % 32;
    if (i + STAGES < total && lane < SHARE)
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];"
            :: "r"(at_rank(empty + i % STAGES * 8, lane)) : "memory");
}

// Multiplies a stage, once it has come, with both halves of x; `add` is false for the first of an item.
__device__ __forceinline__ void multiply(float* first, float* second, u32 base, u32 full, int i, bool add) {
    const u32 at = base + i % STAGES * STAGE_BYTES;
    wait(full + i % STAGES * 8, (i / STAGES) & 1);
    const u64 left = descriptor(at + threadIdx.x / 128 * 64 * 128), right = descriptor(at + WEIGHT_BYTES);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++) {
        wgmma_half(first, left + k * 2, right + k * 2, add || k);
        wgmma_half(second, left + k * 2, right + BATCH / 2 * 128 / 16 + k * 2, add || k);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Adds the products with one half of x; the first half waits for the stage.
__device__ __forceinline__ void multiply_half(float* sums, u32 base, u32 full, int i, int half) {
    const u32 at = base + i % STAGES * STAGE_BYTES;
    if (!half) wait(full + i % STAGES * 8, (i / STAGES) & 1);
    const u64 left = descriptor(at + threadIdx.x / 128 * 64 * 128);
    const u64 right = descriptor(at + WEIGHT_BYTES + half * BATCH / 2 * 128);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_half(sums, left + k * 2, right + k * 2, 1);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Brings the sums of PASS rows of x to `out` [count, size]; two passes are a half.
__device__ __forceinline__ void finish(const float* sums, int pass, unsigned char* area, Place at, u16* out, int size, int count) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned char* half = area + pass % 2 * (PASS * PITCH * 2);
#pragma unroll
    for (int group = 0; group < PASS / 8; group++)
        stage(address(half), PITCH, group, warp, lane, sums + (pass % 2 * PASS / 8 + group) * 4);
    asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory");
    for (int i = threadIdx.x; i < PASS * WIDTH / 8; i += CONSUMERS) {
        const int row = i / (WIDTH / 8), column = i % (WIDTH / 8) * 8;
        const int to = at.block * BATCH + pass * PASS + row, from = at.tile * WIDTH + column;
        if (to < count && from < size)
            *(uint4*)(out + (size_t)to * size + from) = *(const uint4*)(half + row * PITCH * 2 + column * 2);
    }
}

// Multiplies the stages of an item, more than STAGES, of which `i` is the first, and brings the sums to `out`.
//
// The last stages are multiplied with the first half of x, then with the second: meanwhile the outputs of the
// first are written.
//
//   tensor cores   | all of x | .. | all of x | first half, 4 stages | second half, 4 stages |           | all ..
//   outputs        |                                                 | first half            | second half |
//   copy engine    | as stages become free ..                                     | the next item's stages    ..
__device__ __forceinline__ void multiply_item(u32 base, u32 full, u32 empty, int i, int steps, int total, unsigned char* area, Place at, u16* out, int size, int count) {
    // Two arrays: the compiler waits for all products where halves of one are used apart.
    float first[BATCH / 4], second[BATCH / 4];
    const int end = i + steps - STAGES;
    multiply(first, second, base, full, i, false);
    for (i++; i < end; i++) {
        multiply(first, second, base, full, i, true);
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        release(empty, i - 1, total);
    }
    multiply_half(first, base, full, i, 0);
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    release(empty, i - 1, total);
#pragma unroll
    for (int j = 1; j < STAGES; j++) multiply_half(first, base, full, i + j, 0);
#pragma unroll
    for (int j = 0; j < STAGES; j++) multiply_half(second, base, full, i + j, 1);
    // All but the second half's groups.
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(STAGES) : "memory");
    finish(first, 0, area, at, out, size, count);
    finish(first, 1, area, at, out, size, count);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int j = 0; j < STAGES; j++) release(empty, i + j, total);
    finish(second, 2, area, at, out, size, count);
    finish(second, 3, area, at, out, size, count);
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)
gated(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs, u16* out, int size, int count, int steps, int pairs, int blocks) {
    extern __shared__ unsigned char raw[];
    unsigned char* stages = raw + (1024 - address(raw) % 1024) % 1024;
    __shared__ __align__(8) u64 full_barriers[STAGES], empty_barriers[STAGES];
    const u32 base = address(stages), full = address(full_barriers), empty = address(empty_barriers);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + i * 8) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(empty + i * 8), "n"(WARPGROUPS * 4 * SHARE) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_meet();
    // Nothing that an earlier kernel writes is read before this, nor anything written.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (threadIdx.x == CONSUMERS) feed(&weights, &inputs, base, full, empty, steps, pairs, blocks);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(232));
        const int first = blockIdx.x / SHARE, stride = gridDim.x / SHARE, items = pairs * blocks;
        const int total = (items - first + stride - 1) / stride * steps;
        unsigned char* area = stages + STAGES * STAGE_BYTES;
        for (int item = first, i = 0; item < items; item += stride, i += steps)
            multiply_item(base, full, empty, i, steps, total, area, place(item, pairs, blocks), out, size, count);
    }
    // Nobody ends while the other may still write to its memory and barriers.
    cluster_meet();
}
