// Weights times the rows of a batch: out = x * transpose(weight), bfloat16, sums in float32.
//
// The tensor cores' M is weight rows and their N the batch, so that a batch of any size up to 256 fills them.
//
//   grid       (tiles of ROWS weight rows, SPLIT parts of the inner dimension)
//   cluster    (SHARE tiles, all SPLIT parts): the tiles of a part fetch each row of x once for all of them,
//              the parts of a tile add up their sums through one another's shared memory
//   block      WARPGROUPS (1 or 2) of 64 weight rows each, then one that feeds them and leaves them its
//              registers; of 192 rows, the two share the last 64, half of the batch each
//
// A stage of the pipeline is 64 columns of both operands, in the swizzle of 128 bytes that the copy engine
// writes and the tensor cores read. `wgmma` (of BATCH), `wgmma_half` and what is in `tensor_cores.cu` are put in
// front of this text.

#define WARPGROUPS (ROWS == 64 ? 1 : 2)
#define EXTRA (ROWS == 192)
#define WEIGHT_BYTES (ROWS * 128)
#define STAGE_BYTES (WEIGHT_BYTES + BATCH * 128)
#define GROUPS (BATCH / 8)
#define CONSUMERS (WARPGROUPS * 128)
#define WIDTH (GATE ? ROWS / 2 : ROWS)
#define PITCH (WIDTH + 8)

__device__ __forceinline__ void fetch_inputs(const TensorMap* map, u32 to, u32 barrier, int column, int share, int part) {
    const int row = share * (BATCH / SHARE);
    to += row * 128;
#if SHARE > 1
    const u16 mask = ((1 << SHARE) - 1) << (part * SHARE);
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1, {%3, %4}], [%2], %5, %6;"
        :: "r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(mask), "l"(KEEP) : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4}], [%2], %5;"
        :: "r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(KEEP) : "memory");
#endif
}

#define CONSUMERS_MEET() asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory")

// The column at which a step's stage begins. Tiles begin at different ones, lest the same columns of all rows,
// which lie powers of two apart, be asked of few of the memory's channels at once. It made no difference measured.
__device__ __forceinline__ int column_of(int step, int first, int steps) {
    return (first + (step + blockIdx.x / SHARE * ROTATE) % steps) * 64;
}

// Brings stages, each as soon as it is free, behind the first weights, which are on their way.
__device__ __forceinline__ void feed(const TensorMap* weights, const TensorMap* inputs, u32 base, u32 full, u32 empty, int first, int steps) {
    const int tile = blockIdx.x, part = blockIdx.y;
    for (int i = 0; i < steps; i++) {
        const int slot = i % STAGES, column = column_of(i, first, steps);
        const u32 to = base + slot * STAGE_BYTES, ready = full + slot * 8;
        if (i >= STAGES) {
            wait(empty + slot * 8, (i / STAGES - 1) & 1);
            expect(ready, STAGE_BYTES);
            fetch_weights(weights, to, ready, column, tile * ROWS, FIRST_USE);
        }
        fetch_inputs(inputs, to + WEIGHT_BYTES, ready, column, tile % SHARE, part);
    }
}

// Multiplies one stage, once it has come; `add` is false for the first.
__device__ __forceinline__ void multiply(float* sums, float* extra, u32 base, u32 full, int i, bool add) {
    const int slot = i % STAGES, warpgroup = threadIdx.x / 128;
    const u32 at = base + slot * STAGE_BYTES;
    wait(full + slot * 8, (i / STAGES) & 1);
    const u64 left = descriptor(at + warpgroup * 64 * 128), right = descriptor(at + WEIGHT_BYTES);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++) {
        wgmma(sums, left + k * 2, right + k * 2, add || k);
#if EXTRA
        const u64 below = descriptor(at + 128 * 128), half = descriptor(at + WEIGHT_BYTES + warpgroup * BATCH * 64);
        wgmma_half(extra, below + k * 2, half + k * 2, add || k);
#endif
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Multiplies all stages, and tells all that write to one when it is read.
__device__ __forceinline__ void multiply_all(float* sums, float* extra, u32 base, u32 full, u32 empty, int steps) {
    const int lane = threadIdx.x % 32;
    multiply(sums, extra, base, full, 0, false);
    for (int i = 1; i < steps; i++) {
        multiply(sums, extra, base, full, i, true);
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (i - 1 + STAGES < steps && lane < SHARE) {
            const u32 before = (i - 1) % STAGES, peer = blockIdx.y * SHARE + lane;
            asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];"
                :: "r"(at_rank(empty + before * 8, peer)) : "memory");
        }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

__device__ __forceinline__ float4 four(const float* sums) { return make_float4(sums[0], sums[1], sums[2], sums[3]); }

// Adds up what all parts have at one place, in their order, and stages it.
__device__ __forceinline__ void collect(const float4* mine, u32 staged, int group, int warp) {
    float4 v[SPLIT];
    float d[4] = {};
#pragma unroll
    for (int from = 0; from < SPLIT; from++) {
        const u32 at = at_rank(address(mine), from * SHARE + blockIdx.x % SHARE);
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
            : "=f"(v[from].x), "=f"(v[from].y), "=f"(v[from].z), "=f"(v[from].w) : "r"(at) : "memory");
    }
#pragma unroll
    for (int from = 0; from < SPLIT; from++)
        d[0] += v[from].x, d[1] += v[from].y, d[2] += v[from].z, d[3] += v[from].w;
    stage(staged, PITCH, group, warp, threadIdx.x % 32, d);
}

// Brings sums to `out`, through the stages' memory, which nobody reads any more.
__device__ __forceinline__ void finish(const float* sums, const float* extra, unsigned char* stages, u16* out, int rows, int count) {
    const int tile = blockIdx.x, part = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The extra rows: this warp's place among them, and the first batch rows (in eights) that it has of them.
    const int beyond = 8 + warp % 4, begin = warp / 4 * (GROUPS / 2);
    const int first = part * GROUPS / SPLIT, last = (part + 1) * GROUPS / SPLIT;
    unsigned char* area = stages + (SPLIT > 1 ? ROWS * BATCH * 4 : 0);
    const u32 staged = address(area);
    CONSUMERS_MEET();
#if SPLIT > 1
    float4* mine = (float4*)stages + threadIdx.x;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) mine[group * CONSUMERS] = four(sums + group * 4);
#pragma unroll
    for (int group = 0; EXTRA && group < GROUPS / 2; group++) mine[(GROUPS + group) * CONSUMERS] = four(extra + group * 4);
    cluster_sync();
    for (int group = first; group < last; group++) {
        collect(mine + group * CONSUMERS, staged, group - first, warp);
        if (EXTRA && group >= begin && group < begin + GROUPS / 2)
            collect(mine + (GROUPS + group - begin) * CONSUMERS, staged, group - first, beyond);
    }
#else
#pragma unroll
    for (int group = 0; group < GROUPS; group++) stage(staged, PITCH, group, warp, lane, sums + group * 4);
#pragma unroll
    for (int group = 0; EXTRA && group < GROUPS / 2; group++) stage(staged, PITCH, begin + group, beyond, lane, extra + group * 4);
#endif
    CONSUMERS_MEET();
    for (int i = threadIdx.x; i < (last - first) * WIDTH; i += CONSUMERS) {
        const int row = i / (WIDTH / 8), column = i % (WIDTH / 8) * 8, at = first * 8 + row;
        if (at < count && tile * WIDTH + column < rows)
            *(uint4*)(out + (size_t)at * rows + tile * WIDTH + column) = *(const uint4*)(area + row * PITCH * 2 + column * 2);
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)
wide(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs, u16* out, int rows, int count, int all_steps) {
    extern __shared__ unsigned char raw[];
    unsigned char* stages = raw + (1024 - address(raw) % 1024) % 1024;
    __shared__ __align__(8) u64 full_barriers[STAGES], empty_barriers[STAGES];
    const u32 base = address(stages), full = address(full_barriers), empty = address(empty_barriers);
    const bool feeds = threadIdx.x == CONSUMERS;
    // This part's stages; parts differ by one where they do not divide evenly.
    const int first = blockIdx.y * all_steps / SPLIT, steps = (blockIdx.y + 1) * all_steps / SPLIT - first;
#if !LATE
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    if (feeds) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + i * 8) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(empty + i * 8), "n"(WARPGROUPS * 4 * SHARE) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        // Weights are nobody's output: they are on their way before the kernel ahead has ended.
        for (int i = 0; i < STAGES && i < steps; i++) {
            expect(full + i * 8, STAGE_BYTES);
            fetch_weights(&weights, base + i * STAGE_BYTES, full + i * 8, column_of(i, first, steps), blockIdx.x * ROWS, FIRST_USE);
        }
    }
    __syncthreads();
    if (SHARE * SPLIT > 1) cluster_meet();
    // Nothing that an earlier kernel writes is read before this, nor anything written.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (feeds) feed(&weights, &inputs, base, full, empty, first, steps);
        __syncwarp();
        if (SPLIT > 1) cluster_sync();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(232));
        float sums[BATCH / 2], extra[EXTRA ? BATCH / 4 : 1];
        multiply_all(sums, extra, base, full, empty, steps);
#if LATE
        asm volatile("griddepcontrol.launch_dependents;");
#endif
        finish(sums, extra, stages, out, rows, count);
    }
    // Nobody ends while others may still write to its barriers or read its sums.
    if (SHARE * SPLIT > 1) cluster_meet();
}
