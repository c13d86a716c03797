// SPDX-License-Identifier: Apache-2.0
// Gathers the inputs of pairs in the order of their experts, with columns in the order in which coded_wgmma.cu multiplies them.
//
// Column 32 t + 8 q + i + 4 j of a block of 128 goes to 32 q + 8 i + 2 t + j, for t, q and i up to 3 and j up to 1: a product of
// 16 columns takes two of the 16 bytes, (q, i) and (q, i + 1) with an even i. Columns behind the last are zero. One block has the
// pairs of a token; a thread has 32 columns of a block at a time, those with the same q.

typedef unsigned short u16;

#define BLOCKS ((COLUMNS + 127) / 128)
#define PIECES ((BLOCKS * 4 + THREADS - 1) / THREADS)
#define PITCH (BLOCKS * 128)
#define INNER_PITCH ((INNER + 127) / 128 * 128)
#define WARPS (THREADS / 32)

// Finds the numbers of pairs that come before the pairs of a token, whose experts are `experts`. All threads call it.
__device__ __forceinline__ void count_pairs_before(int (&before)[PER_TOKEN], const long long* chosen, int pairs, const long long (&experts)[PER_TOKEN]) {
    __shared__ int counts[PER_TOKEN][WARPS];
    const int first = blockIdx.x * PER_TOKEN;
#pragma unroll
    for (int k = 0; k < PER_TOKEN; k++) before[k] = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
        const long long other = chosen[i];
#pragma unroll
        for (int k = 0; k < PER_TOKEN; k++) before[k] += other >= 0 && (other < experts[k] || (other == experts[k] && i < first + k));
    }
#pragma unroll
    for (int k = 0; k < PER_TOKEN; k++) {
        const int sum = __reduce_add_sync(~0u, before[k]);
        if (threadIdx.x % 32 == 0) counts[k][threadIdx.x / 32] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < PER_TOKEN; k++) {
        before[k] = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) before[k] += counts[k][i];
    }
}

// Returns columns i and i + 4 of the eight columns of each t.
__device__ __forceinline__ uint4 take_pairs(const uint4 (&own)[4], int i) {
    unsigned words[4];
#pragma unroll
    for (int t = 0; t < 4; t++)
        words[t] = __byte_perm(i < 2 ? own[t].x : own[t].y, i < 2 ? own[t].z : own[t].w, i % 2 ? 0x7632 : 0x5410);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

extern "C" __global__ void __launch_bounds__(THREADS) coded_inputs(
    const u16* x, const long long* chosen, u16* inputs, u16* inner, int* order, int* done, int pairs) {
    const int first = blockIdx.x * PER_TOKEN;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    if (threadIdx.x < PER_TOKEN) done[first + threadIdx.x] = 0;
    long long experts[PER_TOKEN];
#pragma unroll
    for (int k = 0; k < PER_TOKEN; k++) experts[k] = chosen[first + k];
    const u16* const from = x + (size_t)blockIdx.x * COLUMNS;
    uint4 pieces[PIECES][4];
#pragma unroll
    for (int j = 0; j < PIECES; j++)
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const int at = threadIdx.x + j * THREADS, column = at / 4 * 128 + t * 32 + at % 4 * 8;
            pieces[j][t] = column < COLUMNS ? *(const uint4*)(from + column) : make_uint4(0, 0, 0, 0);
        }
    int before[PER_TOKEN];
    count_pairs_before(before, chosen, pairs, experts);
#pragma unroll
    for (int k = 0; k < PER_TOKEN; k++) {
        if (experts[k] < 0 || experts[k] >= HELD) continue;
        const size_t place = before[k];
        if (threadIdx.x == 0) order[place] = first + k;
#pragma unroll
        for (int j = 0; j < PIECES; j++) {
            const int at = threadIdx.x + j * THREADS;
            if (at >= BLOCKS * 4) break;
#pragma unroll
            for (int i = 0; i < 4; i++) *(uint4*)(inputs + place * PITCH + at * 32 + i * 8) = take_pairs(pieces[j], i);
        }
        // The next kernel writes all inner elements, but not the columns behind the last.
        if (INNER % 128 && threadIdx.x < 32)
            *(uint2*)(inner + place * INNER_PITCH + INNER / 128 * 128 + threadIdx.x * 4) = make_uint2(0, 0);
    }
}
