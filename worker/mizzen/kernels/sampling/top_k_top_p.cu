// SPDX-License-Identifier: Apache-2.0
// Samples tokens with top-k, top-p and min-p, without sorting the vocabulary.
//
//   grid       (BLOCKS, rows): a cluster of BLOCKS blocks samples one row, each block holds BLOCK_TOKENS consecutive tokens
//   shared     [BLOCK_TOKENS] of float, weights: exp(logit / temperature - highest), and NO_TOKEN after the last token
//
// Top-k and top-p keep the tokens whose weight reaches a floor. The floor is found by bisection over keys, integers
// ordered like the weights: each round counts (top-k) and sums (top-p) the weights that reach three thresholds. For
// 16-bit logits without penalties, keys are the bits of logits, because there are few of them; otherwise keys are the
// bits of weights. All blocks find the same floor, and every sum is in a fixed order, so a row's token is the same in
// any batch.

typedef unsigned int u32;
typedef unsigned long long u64;

#define WARPS (THREADS / 32)
#define THRESHOLDS 3                                // thresholds per round
#define WARP_TOKENS ((BLOCK_TOKENS + WARPS * 32 - 1) / (WARPS * 32) * 32)  // consecutive tokens of a warp
#define FULL_MASK 0xffffffffu
#define NO_TOKEN -1.0f
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define OUTPUT ((1 << 30) - 1)                 // bits of a count that count output tokens; see mizzen.engine.sampling.token_counts.PROMPT_BIT

struct Totals {
    double mass[THRESHOLDS];
    int count[THRESHOLDS];
};
struct Shared {
    Totals warps[WARPS];
    Totals blocks[2][BLOCKS];  // rounds alternate, so that no block overwrites totals that another still reads
    double warp_masses[WARPS];
};

// LOGITS: 0 is bfloat16, 1 is float16, 2 is float32.
#if LOGITS == 2
typedef float Logit;
__device__ __forceinline__ float to_float(Logit logit) { return logit; }
#else
typedef unsigned short Logit;
__device__ __forceinline__ float to_float(Logit logit) {
#if LOGITS == 0
    return __uint_as_float((u32)logit << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(logit));
    return value;
#endif
}
// Approximate 16-bit logit bits; finite values give finite bits.
__device__ __forceinline__ u32 to_logit_bits(float value) {
#if LOGITS == 0
    return __float_as_uint(value) >> 16;
#else
    unsigned short bits;
    asm("cvt.rz.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#endif
}
#define INFINITE (LOGITS == 0 ? 0x7f80u : 0x7c00u)
#endif
struct __align__(TOKENS_PER_LOAD * sizeof(Logit)) Logits {
    Logit each[TOKENS_PER_LOAD];
};
// Equals mizzen.kernels.sampling.penalties.apply_penalties; `penalty` is frequency, presence, repetition.
__device__ __forceinline__ float apply_penalties(float value, int token_counts, const float* penalty) {
    if (token_counts == 0) return value;
    value = value > 0 ? value / penalty[2] : value * penalty[2];
    const int output = token_counts & OUTPUT;
    return value - penalty[0] * output - (output > 0 ? penalty[1] : 0.0f);
}
__device__ __forceinline__ u64 splitmix64(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}
// Uniform in [0, 1); equals mizzen.engine.sampling.rng.uniform.
__device__ __forceinline__ double uniform(u64 seed, u64 position) {
    const u64 golden = 0x9E3779B97F4A7C15ull;
    return (double)(splitmix64(splitmix64(seed + golden) + position * golden) >> 12) * 2.220446049250313e-16;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Cluster barrier without memory ordering: only makes sure that all blocks have started.
__device__ __forceinline__ void cluster_sync_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 map_to_rank(const void* at, u32 rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(remote) : "r"((u32)__cvta_generic_to_shared(at)), "r"(rank));
    return remote;
}
// Sends a block's totals, which every lane of one warp holds, to all blocks of the cluster, then synchronises.
__device__ __forceinline__ void broadcast_totals(Shared& shared, const Totals& own, int round) {
    if (threadIdx.x < BLOCKS) {
        const u32 to = map_to_rank(&shared.blocks[round & 1][blockIdx.x], threadIdx.x);
#pragma unroll
        for (int i = 0; i < THRESHOLDS; i++) {
            asm volatile("st.shared::cluster.f64 [%0], %1;" :: "r"(to + 8 * i), "d"(own.mass[i]) : "memory");
            asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(to + 8 * THRESHOLDS + 4 * i), "r"(own.count[i]) : "memory");
        }
    }
    cluster_sync();
}
// Sums the values of all threads of the cluster; every thread gets the same totals.
__device__ __forceinline__ Totals cluster_sum(Shared& shared, float (&masses)[THRESHOLDS], const int (&counts)[THRESHOLDS], int round) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Totals own = {};
#pragma unroll
    for (int i = 0; i < THRESHOLDS; i++) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) masses[i] += __shfl_xor_sync(FULL_MASK, masses[i], offset);
        own.mass[i] = masses[i];
        own.count[i] = __reduce_add_sync(FULL_MASK, counts[i]);
    }
    if (lane == 0) shared.warps[warp] = own;
    __syncthreads();
    if (warp == 0) {
        own = shared.warps[lane % WARPS];
#pragma unroll
        for (int i = 0; i < THRESHOLDS; i++)
#pragma unroll
            for (int offset = WARPS / 2; offset > 0; offset /= 2) {
                own.mass[i] += __shfl_xor_sync(FULL_MASK, own.mass[i], offset);
                own.count[i] += __shfl_xor_sync(FULL_MASK, own.count[i], offset);
            }
    }
    broadcast_totals(shared, own, round);
    Totals all = {};
#pragma unroll
    for (int block_index = 0; block_index < BLOCKS; block_index++)
#pragma unroll
        for (int i = 0; i < THRESHOLDS; i++) {
            all.mass[i] += shared.blocks[round & 1][block_index].mass[i];
            all.count[i] += shared.blocks[round & 1][block_index].count[i];
        }
    return all;
}
// Returns the maximum over all threads of the cluster.
__device__ __forceinline__ float cluster_max(Shared& shared, float own, int round) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Totals totals = {};
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) own = fmaxf(own, __shfl_xor_sync(FULL_MASK, own, offset));
    if (lane == 0) shared.warp_masses[warp] = own;
    __syncthreads();
    totals.mass[0] = NEGATIVE_INFINITY;
#pragma unroll
    for (int i = 0; i < WARPS; i++) totals.mass[0] = fmax(totals.mass[0], shared.warp_masses[i]);
    broadcast_totals(shared, totals, round);
    double all = NEGATIVE_INFINITY;
#pragma unroll
    for (int block_index = 0; block_index < BLOCKS; block_index++) all = fmax(all, shared.blocks[round & 1][block_index].mass[0]);
    return (float)all;
}

// Logits divided by the temperature, rounded like a division, and their softmax weights.
struct Scale {
    float temperature, inverse, top;
    __device__ __forceinline__ float operator()(float logit) const {
        const float about = logit * inverse;
        return logit == NEGATIVE_INFINITY ? logit : fmaf(fmaf(-about, temperature, logit), inverse, about);
    }
    // If all logits of a row are -inf, its weights are zero.
    __device__ __forceinline__ float weight(float scaled) const { return scaled == NEGATIVE_INFINITY ? 0.0f : expf(scaled - top); }
};
// Integer keys that a search bisects.
struct Keys {
    bool by_logits;
    Scale scale;
    // Lowest key; every token's weight reaches it.
    __device__ __forceinline__ u32 lowest_key() const {
#if LOGITS != 2
        if (by_logits) return ~(INFINITE | 0x8000u) & 0xffffu;  // -inf
#endif
        return 0;
    }
    // Key of a weight of about exp(-distance).
    __device__ __forceinline__ u32 key_at_distance(float distance) const {
#if LOGITS != 2
        if (by_logits) {
            const u32 logit = to_logit_bits((scale.top - distance) * scale.temperature);
            return logit & 0x8000u ? ~logit & 0xffffu : logit | 0x8000u;
        }
#endif
        return __float_as_uint(expf(-distance));
    }
    __device__ __forceinline__ float weight(u32 key) const {
#if LOGITS != 2
        if (by_logits) return scale.weight(scale(to_float((Logit)(key & 0x8000u ? key ^ 0x8000u : ~key))));
#endif
        return __uint_as_float(key);
    }
};
// Bounds of the floor, [low, high): enough tokens reach `low`, too few reach `high`.
struct Search {
    u32 low, high;
    double low_mass, high_mass;
    int low_count, high_count;
    bool begun;
};
__device__ __forceinline__ void count_reaching(float weight, float threshold, int& counted, float& mass) {
    asm("{\n.reg .pred reaches;\nsetp.ge.f32 reaches, %2, %3;\n@reaches add.s32 %0, %0, 1;\n@reaches add.f32 %1, %1, %2;\n}"
        : "+r"(counted), "+f"(mass) : "f"(weight), "f"(threshold));
}
__device__ __forceinline__ void narrow_search(
    Search& search, Shared& shared, const float* weights, const Keys& keys, bool by_mass, double enough, int round) {
    u32 at[THRESHOLDS];
    float thresholds[THRESHOLDS], masses[THRESHOLDS] = {};
    int counts[THRESHOLDS] = {};
    // Most floors lie near the highest logit, so the first thresholds do too.
    const float distances[THRESHOLDS] = {10.0f, 4.5f, 1.5f};
#pragma unroll
    for (int i = 0; i < THRESHOLDS; i++) {
        at[i] = search.low + (u32)((u64)(search.high - search.low) * (i + 1) / (THRESHOLDS + 1));
        if (!search.begun) at[i] = min(max(keys.key_at_distance(distances[i]), search.low), search.high - 1);
        thresholds[i] = keys.weight(at[i]);
    }
    search.begun = true;
#pragma unroll 4
    for (int i = threadIdx.x * TOKENS_PER_LOAD; i < BLOCK_TOKENS; i += THREADS * TOKENS_PER_LOAD) {
        const float4 four = *(const float4*)(weights + i);
#pragma unroll
        for (int j = 0; j < THRESHOLDS; j++) {
            count_reaching(four.x, thresholds[j], counts[j], masses[j]), count_reaching(four.y, thresholds[j], counts[j], masses[j]);
            count_reaching(four.z, thresholds[j], counts[j], masses[j]), count_reaching(four.w, thresholds[j], counts[j], masses[j]);
        }
    }
    const Totals all = cluster_sum(shared, masses, counts, round);
#pragma unroll
    for (int i = 0; i < THRESHOLDS; i++) {
        if (by_mass ? all.mass[i] >= enough : all.count[i] >= enough) {
            search.low = at[i], search.low_mass = all.mass[i], search.low_count = all.count[i];
        } else {
            search.high = at[i], search.high_mass = all.mass[i], search.high_count = all.count[i];
            break;
        }
    }
}

// Samples the first token, in vocabulary order, at which the running sum of the weights that reach `floor` exceeds
// `random` times their total.
__device__ __forceinline__ void sample_token(Shared& shared, const float* weights, float floor, double random, int round, int* token) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int begin = warp * WARP_TOKENS, end = min(begin + WARP_TOKENS, BLOCK_TOKENS);
    __syncthreads();  // weights are complete, and earlier warp masses were read
    float own = 0;
#pragma unroll 4
    for (int at = begin + lane; at < end; at += 32) own += weights[at] >= floor ? weights[at] : 0.0f;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) own += __shfl_xor_sync(FULL_MASK, own, offset);
    if (lane == 0) shared.warp_masses[warp] = own;
    __syncthreads();
    Totals block = {};
    for (int i = 0; i < WARPS; i++) block.mass[0] += shared.warp_masses[i];
    broadcast_totals(shared, block, round);
    const Totals* blocks = shared.blocks[round & 1];
    double total = 0;
    for (int block_index = 0; block_index < BLOCKS; block_index++) total += blocks[block_index].mass[0];
    const double share = random * total;
    // The last block and warp with any weight absorb rounding errors.
    int block_index = 0;
    double before = 0, until = 0;
    for (int i = 0; i < BLOCKS; i++) {
        const double mass = blocks[i].mass[0];
        if (mass > 0) block_index = i, before = until;
        until += mass;
        if (mass > 0 && until > share) break;
    }
    if (block_index != blockIdx.x) return;
    int chosen = 0;
    until = before;
    for (int i = 0; i < WARPS; i++) {
        const double mass = shared.warp_masses[i];
        if (mass > 0) chosen = i, before = until;
        until += mass;
        if (mass > 0 && until > share) break;
    }
    if (warp != chosen) return;
    int last_kept = -1;
    for (int at = begin; at < end; at += 32) {
        const float weight = at + lane < end && weights[at + lane] >= floor ? weights[at + lane] : 0.0f;
        double reached = weight;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const double left = __shfl_up_sync(FULL_MASK, reached, offset);
            if (lane >= offset) reached += left;
        }
        const u32 kept = __ballot_sync(FULL_MASK, weight > 0), beyond = __ballot_sync(FULL_MASK, weight > 0 && before + reached > share);
        if (kept) last_kept = at + 31 - __clz(kept);
        if (beyond) last_kept = at + __ffs(beyond) - 1;
        if (beyond) break;
        before += __shfl_sync(FULL_MASK, reached, 31);
    }
    // A row without any possible token samples the last one of the vocabulary.
    if (lane == 0) *token = last_kept < 0 ? VOCAB - 1 : (int)blockIdx.x * BLOCK_TOKENS + last_kept;
}

// logits [any, VOCAB]; rows [gridDim.y], slots and positions [any]; by slot: temperatures, seeds, top_ks, top_ps, min_ps,
// last_tokens, count_rows, penalties [, 3], bits [, WORDS]; tokens [any], counts: the address of int [any, VOCAB].
// last_tokens, count_rows and bits may be null.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
top_k_top_p(const Logit* logits, const long long* rows, const int* slots, const int* positions, const float* temperatures,
        const long long* seeds, const long long* top_ks, const float* top_ps, const float* min_ps, long long* tokens,
        long long* last_tokens, const long long* count_rows, const float* penalties, int* const* counts, const u32* bits) {
    extern __shared__ __align__(16) float weights[];
    __shared__ Shared shared;
    __shared__ int sampled;
    asm volatile("griddepcontrol.launch_dependents;");
    cluster_sync_relaxed();  // no block writes to the shared memory of one that has not started
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const long long row = rows[blockIdx.y];
    const int slot = slots[row], first = blockIdx.x * BLOCK_TOKENS, valid_tokens = min(BLOCK_TOKENS, VOCAB - first);
    const float temperature = temperatures[slot];
    const long long count_row = count_rows == nullptr ? -1 : count_rows[slot];
    int* const token_counts = count_row < -1 ? *counts + (size_t)(-2 - count_row) * VOCAB : nullptr;
    const float* penalty = penalties + 3 * slot;
    const bool processed = token_counts != nullptr || bits != nullptr;
    if (threadIdx.x == 0) sampled = -1;

    Scale scale = {temperature, 1.0f / temperature, NEGATIVE_INFINITY};
    const Logit* from = logits + (size_t)row * VOCAB + first;
#pragma unroll 4
    for (int i = threadIdx.x * TOKENS_PER_LOAD; i < BLOCK_TOKENS; i += THREADS * TOKENS_PER_LOAD) {
        float value[TOKENS_PER_LOAD] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY, NEGATIVE_INFINITY, NEGATIVE_INFINITY};
#if VOCAB % TOKENS_PER_LOAD == 0
        if (i < valid_tokens) {
            const Logits raw = *(const Logits*)(from + i);
#pragma unroll
            for (int j = 0; j < TOKENS_PER_LOAD; j++) value[j] = to_float(raw.each[j]);
        }
#else
#pragma unroll
        for (int j = 0; j < TOKENS_PER_LOAD; j++)
            if (i + j < valid_tokens) value[j] = to_float(from[i + j]);
#endif
        if (processed)
#pragma unroll
            for (int j = 0; j < TOKENS_PER_LOAD; j++) {
                const int token = first + i + j;
                if (token_counts != nullptr && i + j < valid_tokens) value[j] = apply_penalties(value[j], token_counts[token], penalty);
                if (bits != nullptr && i + j < valid_tokens && !(bits[(size_t)slot * WORDS + token / 32] >> token % 32 & 1))
                    value[j] = NEGATIVE_INFINITY;
            }
#pragma unroll
        for (int j = 0; j < TOKENS_PER_LOAD; j++) {
            value[j] = scale(value[j]);
            scale.top = fmaxf(scale.top, value[j]);
        }
        *(float4*)(weights + i) = make_float4(value[0], value[1], value[2], value[3]);
    }
    int round = 0;
    scale.top = cluster_max(shared, scale.top, round++);
    float masses[THRESHOLDS] = {};
    const int none[THRESHOLDS] = {};
#pragma unroll 4
    for (int i = threadIdx.x * TOKENS_PER_LOAD; i < BLOCK_TOKENS; i += THREADS * TOKENS_PER_LOAD) {
        float4 four = *(const float4*)(weights + i);
        float* const each = &four.x;
#pragma unroll
        for (int j = 0; j < TOKENS_PER_LOAD; j++) {
            each[j] = scale.weight(each[j]);
            masses[0] += each[j];
            if (i + j >= valid_tokens) each[j] = NO_TOKEN;
        }
        *(float4*)(weights + i) = four;
    }
    const long long top_k = top_ks[slot];
    const float top_p = top_ps[slot];
    const Keys keys = {LOGITS != 2 && token_counts == nullptr, scale};
    const u32 end = keys.key_at_distance(0) + 2;  // above the highest, whose key may be one more because of rounding
    Search search = {keys.lowest_key(), end, 0, 0, VOCAB, 0, false};
    double total;
    if (top_k > 0 && top_k < VOCAB) {
        while (search.high - search.low > 1 && search.low_count != top_k)
            narrow_search(search, shared, weights, keys, false, (double)top_k, round++);
        // Of tokens with equal weight at the floor, top-p counts only as many as still fit into top-k.
        total = search.low_mass;
        if (search.low_count > top_k)
            total = search.high_mass + (double)(top_k - search.high_count) * keys.weight(search.low);
        search.high = end, search.high_mass = 0, search.high_count = 0;
    } else if (top_p < 1) {
        total = cluster_sum(shared, masses, none, round++).mass[0];
    }
    if (top_p < 1)
        while (search.high - search.low > 1 && search.low_count - search.high_count > 1)
            narrow_search(search, shared, weights, keys, true, top_p * total, round++);
    // If top-p rounds to zero in 32 bits, the tokens with the highest weight remain.
    const float floor = fmaxf(fminf(keys.weight(search.low), 1.0f), min_ps[slot]);
    sample_token(shared, weights, floor, uniform(seeds[slot], positions[row]), round, &sampled);
    __syncthreads();
    if (threadIdx.x != 0 || sampled < 0) return;
    tokens[row] = sampled;
    if (last_tokens != nullptr) last_tokens[slot] = sampled;
    if (token_counts != nullptr) token_counts[sampled]++;
}
