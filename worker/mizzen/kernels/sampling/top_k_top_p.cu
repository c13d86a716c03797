// Draws a row's token from the part of the vocabulary that top k, top p and min p leave, without putting it in order.
//
//   grid       (PARTS, rows): a cluster of PARTS blocks has a row, each block a run of SHARE of its tokens
//   shared     [SHARE] of float, weights: exp(logit / temperature - highest), and NOTHING behind the last token
//
// What top k and top p keep are the tokens whose weight reaches a floor. It is found by bisection over keys, whole
// numbers in the order of the weights: each round counts (for top k) and adds up (for top p) what reaches three
// thresholds. Keys are the bits of logits of 16 bits, as there are only so many, else the bits of weights. All blocks
// find the same, and every sum has one order whatever else runs, so that a row's token is the same in any batch.

typedef unsigned int u32;
typedef unsigned long long u64;

#define WARPS (THREADS / 32)
#define STEPS 3                                // thresholds of a round
#define RUN ((SHARE + WARPS * 32 - 1) / (WARPS * 32) * 32)  // tokens of a warp, in the vocabulary's order
#define ALL 0xffffffffu
#define NOTHING -1.0f
#define LOWEST __int_as_float(0xff800000)
#define OUTPUT ((1 << 30) - 1)                 // bits of a count that are the output's; see mizzen.engine.sampling.logits_params.PROMPT

struct Totals {
    double mass[STEPS];
    int count[STEPS];
};
struct Shared {
    Totals warps[WARPS];
    Totals blocks[2][PARTS];  // rounds alternate, so that nobody writes what another still reads
    double runs[WARPS];
};

// Logits of BFLOAT16, FLOAT16 or FLOAT32.
#if LOGITS == 2
typedef float Logit;
__device__ __forceinline__ float wide(Logit logit) { return logit; }
#else
typedef unsigned short Logit;
__device__ __forceinline__ float wide(Logit logit) {
#if LOGITS == 0
    return __uint_as_float((u32)logit << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(logit));
    return value;
#endif
}
// Its bits of 16, about; of a finite one those of a finite one.
__device__ __forceinline__ u32 narrowed(float value) {
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
struct __align__(EACH * sizeof(Logit)) Logits {
    Logit each[EACH];
};
// As mizzen.kernels.sampling.penalties.penalized; `by` are frequency, presence, repetition.
__device__ __forceinline__ float penalized(float value, int seen, const float* by) {
    if (seen == 0) return value;
    value = value > 0 ? value / by[2] : value * by[2];
    const int output = seen & OUTPUT;
    return value - by[0] * output - (output > 0 ? by[1] : 0.0f);
}
__device__ __forceinline__ u64 mixed(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}
// In [0, 1), as mizzen.engine.sampling.rng.uniform.
__device__ __forceinline__ double uniform(u64 seed, u64 position) {
    const u64 golden = 0x9E3779B97F4A7C15ull;
    return (double)(mixed(mixed(seed + golden) + position * golden) >> 12) * 2.220446049250313e-16;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// All blocks of the cluster meet, to have begun: nothing was written that the others read.
__device__ __forceinline__ void cluster_meet() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 at_rank(const void* at, u32 rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(remote) : "r"((u32)__cvta_generic_to_shared(at)), "r"(rank));
    return remote;
}
// Lanes of one warp, all of which hold a block's totals, leave them with every block; then all blocks meet.
__device__ __forceinline__ void tell(Shared& shared, const Totals& own, int round) {
    if (threadIdx.x < PARTS) {
        const u32 to = at_rank(&shared.blocks[round & 1][blockIdx.x], threadIdx.x);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            asm volatile("st.shared::cluster.f64 [%0], %1;" :: "r"(to + 8 * i), "d"(own.mass[i]) : "memory");
            asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(to + 8 * STEPS + 4 * i), "r"(own.count[i]) : "memory");
        }
    }
    cluster_sync();
}
// Adds up what all threads of the cluster have; all get the same.
__device__ __forceinline__ Totals sum(Shared& shared, float (&masses)[STEPS], const int (&counts)[STEPS], int round) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Totals own = {};
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) masses[i] += __shfl_xor_sync(ALL, masses[i], offset);
        own.mass[i] = masses[i];
        own.count[i] = __reduce_add_sync(ALL, counts[i]);
    }
    if (lane == 0) shared.warps[warp] = own;
    __syncthreads();
    if (warp == 0) {
        own = shared.warps[lane % WARPS];
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int offset = WARPS / 2; offset > 0; offset /= 2) {
                own.mass[i] += __shfl_xor_sync(ALL, own.mass[i], offset);
                own.count[i] += __shfl_xor_sync(ALL, own.count[i], offset);
            }
    }
    tell(shared, own, round);
    Totals all = {};
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            all.mass[i] += shared.blocks[round & 1][part].mass[i];
            all.count[i] += shared.blocks[round & 1][part].count[i];
        }
    return all;
}
// The highest of what all threads of the cluster have.
__device__ __forceinline__ float highest(Shared& shared, float own, int round) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Totals totals = {};
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) own = fmaxf(own, __shfl_xor_sync(ALL, own, offset));
    if (lane == 0) shared.runs[warp] = own;
    __syncthreads();
    totals.mass[0] = LOWEST;
#pragma unroll
    for (int i = 0; i < WARPS; i++) totals.mass[0] = fmax(totals.mass[0], shared.runs[i]);
    tell(shared, totals, round);
    double all = LOWEST;
#pragma unroll
    for (int part = 0; part < PARTS; part++) all = fmax(all, shared.blocks[round & 1][part].mass[0]);
    return (float)all;
}

// Logits over a temperature, rounded as a division is, and the weights of what that gives.
struct Scale {
    float temperature, inverse, top;
    __device__ __forceinline__ float operator()(float logit) const {
        const float about = logit * inverse;
        return logit == LOWEST ? logit : fmaf(fmaf(-about, temperature, logit), inverse, about);
    }
    // A row of -inf alone weighs nothing.
    __device__ __forceinline__ float weight(float scaled) const { return scaled == LOWEST ? 0.0f : expf(scaled - top); }
};
// The order that a search goes by.
struct Keys {
    bool of_logits;
    Scale scale;
    // What reaches this is everything.
    __device__ __forceinline__ u32 first() const {
#if LOGITS != 2
        if (of_logits) return ~(INFINITE | 0x8000u) & 0xffffu;  // -inf
#endif
        return 0;
    }
    // That of a weight of about exp(-distance).
    __device__ __forceinline__ u32 near(float distance) const {
#if LOGITS != 2
        if (of_logits) {
            const u32 logit = narrowed((scale.top - distance) * scale.temperature);
            return logit & 0x8000u ? ~logit & 0xffffu : logit | 0x8000u;
        }
#endif
        return __float_as_uint(expf(-distance));
    }
    __device__ __forceinline__ float weight(u32 key) const {
#if LOGITS != 2
        if (of_logits) return scale.weight(scale(wide((Logit)(key & 0x8000u ? key ^ 0x8000u : ~key))));
#endif
        return __uint_as_float(key);
    }
};
// The floor lies in [low, high): what reaches `low` is enough, what reaches `high` is not.
struct Search {
    u32 low, high;
    double low_mass, high_mass;
    int low_count, high_count;
    bool begun;
};
__device__ __forceinline__ void count(float weight, float threshold, int& counted, float& mass) {
    asm("{\n.reg .pred reaches;\nsetp.ge.f32 reaches, %2, %3;\n@reaches add.s32 %0, %0, 1;\n@reaches add.f32 %1, %1, %2;\n}"
        : "+r"(counted), "+f"(mass) : "f"(weight), "f"(threshold));
}
__device__ __forceinline__ void narrow(
    Search& search, Shared& shared, const float* weights, const Keys& keys, bool by_mass, double enough, int round) {
    u32 at[STEPS];
    float thresholds[STEPS], masses[STEPS] = {};
    int counts[STEPS] = {};
    // Most floors lie near the highest logit, which is where the first thresholds are.
    const float distances[STEPS] = {10.0f, 4.5f, 1.5f};
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        at[i] = search.low + (u32)((u64)(search.high - search.low) * (i + 1) / (STEPS + 1));
        if (!search.begun) at[i] = min(max(keys.near(distances[i]), search.low), search.high - 1);
        thresholds[i] = keys.weight(at[i]);
    }
    search.begun = true;
#pragma unroll 4
    for (int i = threadIdx.x * EACH; i < SHARE; i += THREADS * EACH) {
        const float4 four = *(const float4*)(weights + i);
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
            count(four.x, thresholds[j], counts[j], masses[j]), count(four.y, thresholds[j], counts[j], masses[j]);
            count(four.z, thresholds[j], counts[j], masses[j]), count(four.w, thresholds[j], counts[j], masses[j]);
        }
    }
    const Totals all = sum(shared, masses, counts, round);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        if (by_mass ? all.mass[i] >= enough : all.count[i] >= enough) {
            search.low = at[i], search.low_mass = all.mass[i], search.low_count = all.count[i];
        } else {
            search.high = at[i], search.high_mass = all.mass[i], search.high_count = all.count[i];
            break;
        }
    }
}

// The token, in the vocabulary's order, at which the sum of weights from `floor` on exceeds a share of their total.
__device__ __forceinline__ void draw(Shared& shared, const float* weights, float floor, double random, int round, int* token) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int begin = warp * RUN, end = min(begin + RUN, SHARE);
    __syncthreads();  // weights are there, and `runs` were read
    float own = 0;
#pragma unroll 4
    for (int at = begin + lane; at < end; at += 32) own += weights[at] >= floor ? weights[at] : 0.0f;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) own += __shfl_xor_sync(ALL, own, offset);
    if (lane == 0) shared.runs[warp] = own;
    __syncthreads();
    Totals block = {};
    for (int i = 0; i < WARPS; i++) block.mass[0] += shared.runs[i];
    tell(shared, block, round);
    const Totals* blocks = shared.blocks[round & 1];
    double total = 0;
    for (int part = 0; part < PARTS; part++) total += blocks[part].mass[0];
    const double share = random * total;
    // Whoever is the last with any weight takes what rounding leaves over.
    int part = 0;
    double before = 0, until = 0;
    for (int i = 0; i < PARTS; i++) {
        const double mass = blocks[i].mass[0];
        if (mass > 0) part = i, before = until;
        until += mass;
        if (mass > 0 && until > share) break;
    }
    if (part != blockIdx.x) return;
    int chosen = 0;
    until = before;
    for (int i = 0; i < WARPS; i++) {
        const double mass = shared.runs[i];
        if (mass > 0) chosen = i, before = until;
        until += mass;
        if (mass > 0 && until > share) break;
    }
    if (warp != chosen) return;
    int found = -1;
    for (int at = begin; at < end; at += 32) {
        const float weight = at + lane < end && weights[at + lane] >= floor ? weights[at + lane] : 0.0f;
        double reached = weight;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const double left = __shfl_up_sync(ALL, reached, offset);
            if (lane >= offset) reached += left;
        }
        const u32 kept = __ballot_sync(ALL, weight > 0), beyond = __ballot_sync(ALL, weight > 0 && before + reached > share);
        if (kept) found = at + 31 - __clz(kept);
        if (beyond) found = at + __ffs(beyond) - 1;
        if (beyond) break;
        before += __shfl_sync(ALL, reached, 31);
    }
    // A row in which nothing is possible has no such token.
    if (lane == 0) *token = found < 0 ? VOCAB - 1 : (int)blockIdx.x * SHARE + found;
}

// logits [any, VOCAB]; rows [gridDim.y], slots and positions [any]; by slot: temperatures, seeds, top_ks, top_ps, min_ps,
// last_tokens, places, penalties [, 3], bits [, WORDS]; tokens [any], counts: the address of int [any, VOCAB].
// last_tokens, places and bits may be null.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
filters(const Logit* logits, const long long* rows, const int* slots, const int* positions, const float* temperatures,
        const long long* seeds, const long long* top_ks, const float* top_ps, const float* min_ps, long long* tokens,
        long long* last_tokens, const long long* places, const float* penalties, int* const* counts, const u32* bits) {
    extern __shared__ __align__(16) float weights[];
    __shared__ Shared shared;
    __shared__ int drawn;
    asm volatile("griddepcontrol.launch_dependents;");
    cluster_meet();  // nobody writes to the memory of a block that has not begun
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const long long row = rows[blockIdx.y];
    const int slot = slots[row], first = blockIdx.x * SHARE, held = min(SHARE, VOCAB - first);
    const float temperature = temperatures[slot];
    const long long place = places == nullptr ? -1 : places[slot];
    int* const seen = place < -1 ? *counts + (size_t)(-2 - place) * VOCAB : nullptr;
    const float* by = penalties + 3 * slot;
    const bool processed = seen != nullptr || bits != nullptr;
    if (threadIdx.x == 0) drawn = -1;

    Scale scale = {temperature, 1.0f / temperature, LOWEST};
    const Logit* from = logits + (size_t)row * VOCAB + first;
#pragma unroll 4
    for (int i = threadIdx.x * EACH; i < SHARE; i += THREADS * EACH) {
        float value[EACH] = {LOWEST, LOWEST, LOWEST, LOWEST};
#if VOCAB % EACH == 0
        if (i < held) {
            const Logits raw = *(const Logits*)(from + i);
#pragma unroll
            for (int j = 0; j < EACH; j++) value[j] = wide(raw.each[j]);
        }
#else
#pragma unroll
        for (int j = 0; j < EACH; j++)
            if (i + j < held) value[j] = wide(from[i + j]);
#endif
        if (processed)
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                const int token = first + i + j;
                if (seen != nullptr && i + j < held) value[j] = penalized(value[j], seen[token], by);
                if (bits != nullptr && i + j < held && !(bits[(size_t)slot * WORDS + token / 32] >> token % 32 & 1))
                    value[j] = LOWEST;
            }
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            value[j] = scale(value[j]);
            scale.top = fmaxf(scale.top, value[j]);
        }
        *(float4*)(weights + i) = make_float4(value[0], value[1], value[2], value[3]);
    }
    int round = 0;
    scale.top = highest(shared, scale.top, round++);
    float masses[STEPS] = {};
    const int none[STEPS] = {};
#pragma unroll 4
    for (int i = threadIdx.x * EACH; i < SHARE; i += THREADS * EACH) {
        float4 four = *(const float4*)(weights + i);
        float* const each = &four.x;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            each[j] = scale.weight(each[j]);
            masses[0] += each[j];
            if (i + j >= held) each[j] = NOTHING;
        }
        *(float4*)(weights + i) = four;
    }
    const long long top_k = top_ks[slot];
    const float top_p = top_ps[slot];
    const Keys keys = {LOGITS != 2 && seen == nullptr, scale};
    const u32 end = keys.near(0) + 2;  // behind the highest, whose key may be one more for rounding
    Search search = {keys.first(), end, 0, 0, VOCAB, 0, false};
    double total;
    if (top_k > 0 && top_k < VOCAB) {
        while (search.high - search.low > 1 && search.low_count != top_k)
            narrow(search, shared, weights, keys, false, (double)top_k, round++);
        // Of equal ones at the end, top p counts as many as top k has room for.
        total = search.low_mass;
        if (search.low_count > top_k)
            total = search.high_mass + (double)(top_k - search.high_count) * keys.weight(search.low);
        search.high = end, search.high_mass = 0, search.high_count = 0;
    } else if (top_p < 1) {
        total = sum(shared, masses, none, round++).mass[0];
    }
    if (top_p < 1)
        while (search.high - search.low > 1 && search.low_count - search.high_count > 1)
            narrow(search, shared, weights, keys, true, top_p * total, round++);
    // Of a top p that is no more than zero in 32 bits the highest are left.
    const float floor = fmaxf(fminf(keys.weight(search.low), 1.0f), min_ps[slot]);
    draw(shared, weights, floor, uniform(seeds[slot], positions[row]), round, &drawn);
    __syncthreads();
    if (threadIdx.x != 0 || drawn < 0) return;
    tokens[row] = drawn;
    if (last_tokens != nullptr) last_tokens[slot] = drawn;
    if (seen != nullptr) seen[drawn]++;
}
