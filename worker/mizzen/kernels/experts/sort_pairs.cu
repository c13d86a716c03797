// SPDX-License-Identifier: Apache-2.0
// Sorts pairs of token and expert by expert, stably, and divides the pairs of each expert into blocks of about equal size.
//
// `count_pairs` counts the pairs of each expert in each chunk of CHUNK pairs; `place_pairs` then knows where each chunk's pairs of
// an expert begin. Blocks but the last of an expert have a multiple of BLOCK_STEP pairs. EXPERTS is the number of experts that this rank holds; pairs of others are left out.

#define CHUNK 1024
#define BLOCK_STEP 16
#define WARPS (CHUNK / 32)

// A block of sorted pairs of one expert, and all blocks of its expert; many_rows.cu reads it.
struct __align__(16) PairBlock {
    int expert, start, count, unused;
    int first_block, expert_blocks, unused1, unused2;
};

__device__ __forceinline__ int load_expert(const long long* chosen, int pair, int pairs) {
    const long long expert = pair < pairs ? chosen[pair] : -1;
    return expert >= 0 && expert < EXPERTS ? (int)expert : EXPERTS;
}

extern "C" __global__ void __launch_bounds__(CHUNK) count_pairs(const long long* chosen, int* counts, int pairs) {
    __shared__ int own[EXPERTS + 1];
    for (int i = threadIdx.x; i <= EXPERTS; i += CHUNK) own[i] = 0;
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    atomicAdd(own + load_expert(chosen, blockIdx.x * CHUNK + threadIdx.x, pairs), 1);
    __syncthreads();
    for (int i = threadIdx.x; i < EXPERTS; i += CHUNK) counts[blockIdx.x * EXPERTS + i] = own[i];
}

// Replaces values[0..EXPERTS) by the sums of the values before each, and returns the sum of all. All threads take part.
__device__ __forceinline__ int scan_exclusive(int* values, int* partial) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int total = 0;
    for (int from = 0; from < EXPERTS; from += CHUNK) {
        const int i = from + threadIdx.x, own = i < EXPERTS ? values[i] : 0;
        int sum = own;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == 31) partial[warp] = sum;
        __syncthreads();
        int before = total;
        for (int other = 0; other < WARPS; other++) {
            if (other < warp) before += partial[other];
            total += partial[other];
        }
        if (i < EXPERTS) values[i] = before + sum - own;
        __syncthreads();
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(CHUNK)
place_pairs(const long long* chosen, const int* counts, int* sorted, PairBlock* blocks, int* block_count, int pairs, int max_pairs) {
    __shared__ int starts[EXPERTS], places[EXPERTS], first_blocks[EXPERTS], partial[WARPS];
    extern __shared__ unsigned short of_warp[];  // [WARPS][EXPERTS]: pairs of a warp, then those of the warps before it
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunks = gridDim.x, pair = blockIdx.x * CHUNK + threadIdx.x;
    for (int i = threadIdx.x; i < WARPS * EXPERTS; i += CHUNK) of_warp[i] = 0;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    const int expert = load_expert(chosen, pair, pairs);
    const unsigned same = __match_any_sync(0xffffffffu, expert);
    const int rank = __popc(same & ((1u << lane) - 1));
    __syncthreads();
    if (rank == 0 && expert < EXPERTS) of_warp[warp * EXPERTS + expert] = __popc(same);
    for (int i = threadIdx.x; i < EXPERTS; i += CHUNK) {
        int all = 0, before = 0;
#pragma unroll 8
        for (int chunk = 0; chunk < chunks; chunk++) {
            const int own = counts[chunk * EXPERTS + i];
            all += own;
            before += chunk < blockIdx.x ? own : 0;
        }
        starts[i] = all, places[i] = before, first_blocks[i] = (all + max_pairs - 1) / max_pairs;
    }
    __syncthreads();
    int own_counts[(EXPERTS + CHUNK - 1) / CHUNK];
    for (int i = threadIdx.x, k = 0; i < EXPERTS; i += CHUNK, k++) {
        own_counts[k] = starts[i];
        int before = 0;
        for (int other = 0; other < WARPS; other++) {
            const int own = of_warp[other * EXPERTS + i];
            of_warp[other * EXPERTS + i] = before;
            before += own;
        }
    }
    __syncthreads();
    scan_exclusive(starts, partial);
    if (expert < EXPERTS) sorted[starts[expert] + places[expert] + of_warp[warp * EXPERTS + expert] + rank] = pair;
    if (blockIdx.x) return;
    const int total = scan_exclusive(first_blocks, partial);
    if (threadIdx.x == 0) *block_count = total;
    for (int i = threadIdx.x, k = 0; i < EXPERTS; i += CHUNK, k++) {
        const int own = own_counts[k], parts = (own + max_pairs - 1) / max_pairs, first = first_blocks[i];
        const long long steps = (own + BLOCK_STEP - 1) / BLOCK_STEP;
        for (int part = 0; part < parts; part++) {
            const int from = (int)(steps * part / parts) * BLOCK_STEP, to = min(own, (int)(steps * (part + 1) / parts) * BLOCK_STEP);
            blocks[first + part] = {i, starts[i] + from, to - from, 0, first, parts, 0, 0};
        }
    }
}
