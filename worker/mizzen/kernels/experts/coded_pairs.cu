// SPDX-License-Identifier: Apache-2.0
// The expert of a block and its pairs, found in the router's choice; prepended to coded_mma.cu.

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

// Stores the experts of all pairs, or NO_EXPERT, in `picks`, and sets their bits in `present`. A thread's loads are on their way
// together.
__device__ __forceinline__ void load_picks(u16* picks, unsigned* present, const long long* chosen, int pairs) {
    for (int first = threadIdx.x; first < pairs; first += THREADS * 4) {
        long long experts[4];
#pragma unroll
        for (int i = 0; i < 4; i++) experts[i] = first + i * THREADS < pairs ? load_choice(chosen + first + i * THREADS) : -1;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (first + i * THREADS >= pairs) break;
            const bool held = experts[i] >= 0 && experts[i] < HELD;
            picks[first + i * THREADS] = held ? experts[i] : NO_EXPERT;
            if (held) atomicOr(present + experts[i] / 32, 1u << experts[i] % 32);
        }
    }
}

// Moves the pairs of an expert to the front of `picks`, which hold the experts of all pairs, in ascending order; returns their
// number. All threads call it; each warp looks for pairs in its part. `counts` holds a number for each warp.
__device__ __forceinline__ int collect_pairs(u16* picks, int* counts, int pairs, int expert) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = (pairs + THREADS - 1) / THREADS, first = warp * steps * 32 + lane;
    unsigned long long own = 0;  // bit i belongs to the warp's step i
    int count = 0, before = 0, total = 0;
    for (int i = 0; i < steps; i++) {
        const bool is_own = first + i * 32 < pairs && picks[first + i * 32] == expert;
        own |= (unsigned long long)is_own << i;
        count += __popc(__ballot_sync(~0u, is_own));
    }
    if (lane == 0) counts[warp] = count;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; i++) total += counts[i], before += i < warp ? counts[i] : 0;
    for (int i = 0; i < steps && count > 0; i++) {
        const bool is_own = own >> i & 1;
        const unsigned owners = __ballot_sync(~0u, is_own);
        if (is_own) picks[before + __popc(owners & ((1u << lane) - 1))] = first + i * 32;
        before += __popc(owners);
    }
    return total;
}
