// SPDX-License-Identifier: Apache-2.0
// Swap-AB GEMM of weights and inputs in 8 bits (E4M3 or INT8) for small batches: out = x * transpose(weight), bfloat16.
//
// As in swap_ab.cu, the wgmma M dimension is weight rows and its N dimension the batch.
//
//   grid       (tiles of 64 * WARPGROUPS weight rows, SPLIT_K k-splits)
//   cluster    (MULTICAST tiles, all k-splits): the tiles of a k-split load each row of x once by TMA multicast, the
//              k-splits of a tile reduce their sums through distributed shared memory
//   block      consumer WARPGROUPS of 64 weight rows each, then the producer: a warp, or with several consumer
//              warpgroups a warpgroup that gives up its registers
//
// A pipeline stage is 128 columns of both operands, in the 128-byte swizzle that TMA writes and wgmma reads.
// E4M3: the tensor cores add with fewer bits than float32, so the sums of a stage are added to float32 sums; with GROUPED,
// they are first multiplied by the scales of the stage's columns. Large batches are multiplied in two PARTS, to save
// registers. INT8: sums are exact in 32-bit integers.
// Without GROUPED, the sums are multiplied by the scales of the weight row and of the row of x at the end.
// `wgmma` (N = PART), bf16.cu and hopper.cu are prepended to this text.

#define TILE_ROWS (WARPGROUPS * 64)
#define WEIGHT_BYTES (TILE_ROWS * 128)
#define OPERAND_BYTES (WEIGHT_BYTES + BATCH * 128)
#define SCALE_BYTES (GROUPED ? (BATCH * 4 + 1023) / 1024 * 1024 : 0)
#define STAGE_BYTES (OPERAND_BYTES + SCALE_BYTES)
#define BATCH_GROUPS (BATCH / 8)
#define CONSUMERS (WARPGROUPS * 128)
#define PRODUCERS (WARPGROUPS == 1 ? 32 : 128)
#define TILE_OUTPUTS (SWIGLU ? TILE_ROWS / 2 : TILE_ROWS)
#define PITCH (TILE_OUTPUTS + 8)

#if INT8
typedef int Sum;
#define KEEP_REGISTER(x) asm volatile("" : "+r"(x) :: "memory")
#else
typedef float Sum;
#define KEEP_REGISTER(x) asm volatile("" : "+f"(x) :: "memory")
#endif

#define CONSUMER_BARRIER() asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory")

// Scales of the weights [ceil(rows / row_step), groups], and of x: [groups, stride] with GROUPED, else [count] or, with
// stride 0, one scale.
struct Scales {
    const float* weights;
    const float* inputs;
    int row_step, groups, stride;
};

__device__ __forceinline__ u32 scale_bytes(int count) { return GROUPED ? (count + 3) / 4 * 16 : 0; }

__device__ __forceinline__ void load_input_scales(const Scales& scales, u32 target, u32 barrier, int step, int count) {
#if GROUPED
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(target), "l"(scales.inputs + (size_t)step * scales.stride), "r"(scale_bytes(count)), "r"(barrier) : "memory");
#endif
}

// Producer: loads every stage as soon as it is free. The first weights are already in flight.
__device__ __forceinline__ void produce_stages(const TensorMap* weights, const TensorMap* inputs, const Scales& scales, u32 base, u32 full, u32 empty, int first, int steps, int count) {
    const int tile = blockIdx.x, k_split = blockIdx.y;
    for (int i = 0; i < steps; i++) {
        const int slot = i % STAGES, step = first + i;
        const u32 target = base + slot * STAGE_BYTES, ready = full + slot * 8;
        if (i >= STAGES) {
            wait_barrier(empty + slot * 8, (i / STAGES - 1) & 1);
            expect_bytes(ready, OPERAND_BYTES + scale_bytes(count));
            tma_load_weights(weights, target, ready, step * 128, tile * TILE_ROWS, EVICT_FIRST);
        }
        tma_load_shared_inputs<BATCH, MULTICAST>(inputs, target + WEIGHT_BYTES, ready, step * 128, tile % MULTICAST, k_split);
        load_input_scales(scales, target + OPERAND_BYTES, ready, step, count);
    }
}

// Releases a stage to every block that writes to it.
__device__ __forceinline__ void release_stage(u32 empty, int i, int steps) {
    const int lane = threadIdx.x % 32;
    if (i + STAGES < steps && lane < MULTICAST)
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];"
            :: "r"(map_to_rank(empty + i % STAGES * 8, blockIdx.y * MULTICAST + lane)) : "memory");
}

// Multiplies the 128 columns of a stage by `PART` rows of x, from part `part` on.
__device__ __forceinline__ void multiply_part(Sum* sums, u32 address, int part, bool add) {
    const u64 left = smem_descriptor(address + threadIdx.x / 128 * 64 * 128), right = smem_descriptor(address + WEIGHT_BYTES + part * PART * 128);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma(sums, left + k * 2, right + k * 2, add || k);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

#if INT8
// Multiplies all stages; two stages are in flight.
__device__ __forceinline__ void multiply_all_stages(Sum* sums, const float* low, const float* high, unsigned char* stages, u32 full, u32 empty, int steps) {
    const u32 base = shared_address(stages);
    for (int i = 0; i < steps; i++) {
        wait_barrier(full + i % STAGES * 8, (i / STAGES) & 1);
        multiply_part(sums, base + i % STAGES * STAGE_BYTES, 0, i > 0);
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (i > 0) release_stage(empty, i - 1, steps);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int j = 0; j < BATCH / 2; j++) KEEP_REGISTER(sums[j]);
}
#else
// Adds the sums of a part of a stage to the float32 sums. `low` and `high` are the stage's weight scales of this thread's two
// rows, and `input_scales` those of x.
__device__ __forceinline__ void add_products(Sum* sums, float* products, int part, float low, float high, const float2* input_scales) {
#pragma unroll
    for (int j = 0; j < PART / 2; j++) KEEP_REGISTER(products[j]);
#pragma unroll
    for (int group = 0; group < PART / 8; group++) {
        float* own = sums + part * (PART / 2) + group * 4;
        const float* product = products + group * 4;
#if GROUPED
        const float2 x = input_scales[(part * (PART / 8) + group) * 4];
        own[0] = fmaf(product[0], low * x.x, own[0]), own[1] = fmaf(product[1], low * x.y, own[1]);
        own[2] = fmaf(product[2], high * x.x, own[2]), own[3] = fmaf(product[3], high * x.y, own[3]);
#else
        own[0] += product[0], own[1] += product[1], own[2] += product[2], own[3] += product[3];
#endif
    }
}

// Multiplies all stages, part by part. `low` and `high` point at the weight scales of this thread's two rows; with GROUPED, at
// those of the first stage.
__device__ __forceinline__ void multiply_all_stages(Sum* sums, const float* low, const float* high, unsigned char* stages, u32 full, u32 empty, int steps) {
    const u32 base = shared_address(stages);
    float next_low = GROUPED ? __ldg(low) : 1, next_high = GROUPED ? __ldg(high) : 1;
#pragma unroll
    for (int j = 0; j < BATCH / 2; j++) sums[j] = 0;
    for (int i = 0; i < steps; i++) {
        const int slot = i % STAGES;
        const float own_low = next_low, own_high = next_high;
        if (GROUPED && i + 1 < steps) next_low = __ldg(low + i + 1), next_high = __ldg(high + i + 1);
        const float2* input_scales = (const float2*)(stages + slot * STAGE_BYTES + OPERAND_BYTES) + threadIdx.x % 4;
        wait_barrier(full + slot * 8, (i / STAGES) & 1);
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            float products[PART / 2];
            multiply_part(products, base + slot * STAGE_BYTES, part, false);
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            add_products(sums, products, part, own_low, own_high, input_scales);
        }
        __syncwarp();
        release_stage(empty, i, steps);
    }
}
#endif

// Returns the sums of a batch group, multiplied by the scales unless they already are, with the bias added.
__device__ __forceinline__ float4 finish_sums(const Sum* sums, int group, const Scales& scales, float low, float high, float bias_low, float bias_high, int count) {
    float4 v = make_float4(sums[0], sums[1], sums[2], sums[3]);
#if !GROUPED
    const int row = group * 8 + threadIdx.x % 4 * 2;
    const float a = scales.inputs[min(row, count - 1) * scales.stride], b = scales.inputs[min(row + 1, count - 1) * scales.stride];
    v.x *= low * a, v.y *= low * b, v.z *= high * a, v.w *= high * b;
#endif
    v.x += bias_low, v.y += bias_low, v.z += bias_high, v.w += bias_high;
    return v;
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, BLOCKS_PER_SM)
w8a8_swap_ab(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs, const float* weight_scales, const float* input_scales,
             const float* bias, u16* out, int rows, int count, int all_steps, int row_step, int scale_stride) {
    extern __shared__ unsigned char raw[];
    unsigned char* stages = raw + (1024 - shared_address(raw) % 1024) % 1024;
    __shared__ __align__(8) u64 full_barriers[STAGES], empty_barriers[STAGES];
    const u32 base = shared_address(stages), full = shared_address(full_barriers), empty = shared_address(empty_barriers);
    const Scales scales = {weight_scales, input_scales, row_step, GROUPED ? all_steps : 1, scale_stride};
    const bool is_producer = threadIdx.x == CONSUMERS;
    const int tile = blockIdx.x, k_split = blockIdx.y;
    // Stages of this k-split; counts differ by one if the stages do not divide evenly.
    const int first = k_split * all_steps / SPLIT_K, steps = (k_split + 1) * all_steps / SPLIT_K - first;
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
            expect_bytes(full + i * 8, OPERAND_BYTES + scale_bytes(count));
            tma_load_weights(&weights, base + i * STAGE_BYTES, full + i * 8, (first + i) * 128, tile * TILE_ROWS, EVICT_FIRST);
        }
    }
    __syncthreads();
    if (MULTICAST * SPLIT_K > 1) cluster_sync_relaxed();
    // PDL wait: outputs of earlier kernels are neither read nor overwritten before this point.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x >= CONSUMERS) {
#if WARPGROUPS > 1
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
#endif
        if (is_producer) produce_stages(&weights, &inputs, scales, base, full, empty, first, steps, count);
        __syncwarp();
        if (SPLIT_K > 1) cluster_sync();
    } else {
#if WARPGROUPS > 1
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CONSUMER_REGISTERS));
#endif
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        // This thread's two rows of the weight; with SwiGLU, a gate row and its up row.
        const int own = SWIGLU ? tile * TILE_OUTPUTS + warp * 8 + lane / 4 : tile * TILE_ROWS + warp * 16 + lane / 4;
        const int low_row = min(own, rows - 1), high_row = SWIGLU ? rows + low_row : min(own + 8, rows - 1);
        const float* low = scales.weights + (size_t)(low_row / row_step) * scales.groups + (GROUPED ? first : 0);
        const float* high = scales.weights + (size_t)(high_row / row_step) * scales.groups + (GROUPED ? first : 0);
        Sum sums[BATCH / 2];
        multiply_all_stages(sums, low, high, stages, full, empty, steps);
        // With DEFER_PDL nothing triggers the next kernel: its blocks start together when these blocks have ended.
        // Writes the outputs through the shared memory of the stages, which are no longer read.
        const bool adds_bias = bias != 0 && k_split == 0;
        const float row_low = GROUPED ? 1 : __ldg(low), row_high = GROUPED ? 1 : __ldg(high);
        const float bias_low = adds_bias ? __ldg(bias + low_row) : 0, bias_high = adds_bias ? __ldg(bias + high_row) : 0;
        const int first_group = k_split * BATCH_GROUPS / SPLIT_K, last_group = (k_split + 1) * BATCH_GROUPS / SPLIT_K;
        unsigned char* staging = stages + (SPLIT_K > 1 ? TILE_ROWS * BATCH * 4 : 0);
        const u32 staging_address = shared_address(staging);
        CONSUMER_BARRIER();
#if SPLIT_K > 1
        float4* own_sums = (float4*)stages + threadIdx.x;
#pragma unroll
        for (int group = 0; group < BATCH_GROUPS; group++)
            own_sums[group * CONSUMERS] = finish_sums(sums + group * 4, group, scales, row_low, row_high, bias_low, bias_high, count);
        cluster_sync();
        for (int group = first_group; group < last_group; group++)
            reduce_splits<SPLIT_K, MULTICAST>(own_sums + group * CONSUMERS, staging_address, PITCH, group - first_group, warp, blockIdx.x % MULTICAST);
#else
#pragma unroll
        for (int group = 0; group < BATCH_GROUPS; group++) {
            const float4 v = finish_sums(sums + group * 4, group, scales, row_low, row_high, bias_low, bias_high, count);
            const float d[4] = {v.x, v.y, v.z, v.w};
            stage_outputs(staging_address, PITCH, group, warp, lane, d);
        }
#endif
        CONSUMER_BARRIER();
        for (int i = threadIdx.x; i < (last_group - first_group) * TILE_OUTPUTS; i += CONSUMERS) {
            const int row = i / (TILE_OUTPUTS / 8), column = i % (TILE_OUTPUTS / 8) * 8, batch_row = first_group * 8 + row;
            if (batch_row < count && tile * TILE_OUTPUTS + column < rows)
                *(uint4*)(out + (size_t)batch_row * rows + tile * TILE_OUTPUTS + column) = *(const uint4*)(staging + row * PITCH * 2 + column * 2);
        }
    }
    // No block exits while others may still arrive at its barriers or read its sums.
    if (MULTICAST * SPLIT_K > 1) cluster_sync_relaxed();
}
