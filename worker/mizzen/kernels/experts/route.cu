// SPDX-License-Identifier: Apache-2.0
// Logits of a router and the choice of experts, in one launch.
//
//   grid     (tiles of experts, tiles of 8 tokens)
//   cluster  all tiles of experts: its blocks store the logits of a token in the shared memory of the block that chooses its experts
//   block    M_TILES * 16 experts; 16 warps, each with UNITS units of 32 columns
//
// Experts are the M dimension of mma.m16n8k16 and tokens its N dimension. Lane (g, t) = (lane / 4, lane % 4) loads columns 8 t to
// 8 t + 7 of a unit, of experts g and g + 8 of a tile and of token g, for two products. The weights are on their way before the
// kernel waits for the one before.

typedef unsigned char u8;
typedef unsigned short u16;

#define WARPS 16
#define UNITS ((HIDDEN / 32 + WARPS - 1) / WARPS)
#define BLOCK_EXPERTS (16 * M_TILES)
#define CLUSTER ((COUNT + BLOCK_EXPERTS - 1) / BLOCK_EXPERTS)
// Scores of a lane: experts lane, lane + 32, and so on.
#define SCORES ((COUNT + 31) / 32)

// Sums of the columns of each warp, logits of the tokens whose experts the block chooses, and the barrier that counts their bytes.
struct Shared {
    float parts[WARPS][BLOCK_EXPERTS][8], logits[8][COUNT];
    unsigned long long barrier;
};

struct Rules {
    int first;
    float floor, scale;
};

__device__ __forceinline__ void mma(float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned address_of(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

// Initializes the barrier; other blocks see it once the cluster has met.
__device__ __forceinline__ void expect_bytes(unsigned long long* barrier, int bytes) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address_of(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(address_of(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for_bytes(unsigned long long* barrier) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0; @!done bra again; }"
        :: "r"(address_of(barrier)) : "memory");
}

__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Stores a value in another block of the cluster, whose barrier counts the bytes. `own` and `barrier` are in this block.
__device__ __forceinline__ void store_remote(float* own, unsigned long long* barrier, int block, float value) {
    asm volatile("{ .reg .b32 to, counts; mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 counts, %1, %2; "
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %3, [counts]; }"
        :: "r"(address_of(own)), "r"(address_of(barrier)), "r"(block), "r"(__float_as_uint(value)) : "memory");
}

// Loads a lane's 16 bytes of each unit of a row; zeros behind its last column.
__device__ __forceinline__ void load_row(uint4* to, const u16* row) {
    const int first = threadIdx.x / 32 * UNITS * 32 + threadIdx.x % 4 * 8;
#pragma unroll
    for (int i = 0; i < UNITS; i++) to[i] = __ldcg((const uint4*)(row + (first + i * 32 < HIDDEN ? first + i * 32 : 0)));
    if (HIDDEN % (32 * WARPS) == 0) return;
#pragma unroll
    for (int i = 0; i < UNITS; i++)
        if (first + i * 32 >= HIDDEN) to[i] = make_uint4(0, 0, 0, 0);
}

// Returns an integer above 0 that sorts a float as PyTorch does: NaN is the largest, and -0 equals 0.
__device__ __forceinline__ unsigned rank_of(float value) {
    const unsigned bits = __float_as_uint(value == 0 ? 0.0f : value);
    if (value != value) return 0xffffffffu;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float add_warp(float value) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) value += __shfl_xor_sync(~0u, value, i);
    return value;
}

__device__ __forceinline__ float max_warp(float value) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
        const float other = __shfl_xor_sync(~0u, value, i);
        value = other > value || other != other ? other : value;
    }
    return value;
}

// Replaces a token's logits by its scores.
__device__ __forceinline__ void compute_scores(float* scores) {
    const int lane = threadIdx.x % 32;
    if (!SOFTMAX) {
#pragma unroll
        for (int i = 0; i < SCORES; i++) scores[i] = 1 / (1 + expf(-scores[i]));
        return;
    }
    float largest = scores[0], total = 0;
#pragma unroll
    for (int i = 1; i < SCORES; i++) largest = scores[i] > largest || scores[i] != scores[i] ? scores[i] : largest;
    largest = max_warp(largest);
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        scores[i] = lane + i * 32 < COUNT ? expf(scores[i] - largest) : 0;
        total += scores[i];
    }
    total = add_warp(total);
#pragma unroll
    for (int i = 0; i < SCORES; i++) scores[i] /= total;
}

// Chooses the experts of a token, and replaces its logits by scores; a warp calls it.
__device__ __forceinline__ void choose(float* logits, const float* correction, bool live, Rules rules, long long* chosen, float* weights) {
    const int lane = threadIdx.x % 32;
    float scores[SCORES];
    unsigned ranks[SCORES];
#pragma unroll
    for (int i = 0; i < SCORES; i++) scores[i] = lane + i * 32 < COUNT ? logits[lane + i * 32] : __int_as_float(0xff800000);
    compute_scores(scores);
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        const bool exists = lane + i * 32 < COUNT;
        if (exists) logits[lane + i * 32] = scores[i];
        ranks[i] = exists ? rank_of(scores[i] + (HAS_CORRECTION ? correction[lane + i * 32] : 0.0f)) : 0;
    }
    __syncwarp();
    int expert = 0;
#pragma unroll 1
    for (int k = 0; k < PER_TOKEN; k++) {
        unsigned own = ranks[0];
        int place = lane;
#pragma unroll
        for (int i = 1; i < SCORES; i++)
            if (ranks[i] > own) own = ranks[i], place = lane + i * 32;
        const unsigned best = __reduce_max_sync(~0u, own);
        const int winner = __reduce_min_sync(~0u, own == best ? (unsigned)place : ~0u);
        if (lane == k) expert = winner;
#pragma unroll
        for (int i = 0; i < SCORES; i++)
            if (winner == lane + i * 32) ranks[i] = 0;
    }
    float factor = lane < PER_TOKEN ? logits[expert] : 0;
    if (RENORMALIZE) {
        const float total = add_warp(factor);
        factor /= total < rules.floor ? rules.floor : total;
    }
    expert -= rules.first;
    const bool held = live && expert >= 0 && expert < HELD;
    if (lane < PER_TOKEN) {
        chosen[lane] = held ? expert : HELD;
        weights[lane] = held ? factor * rules.scale : 0;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) route(
    const u16* x, const u16* weight, const float* logit_bias, const float* correction, const u8* live, long long* chosen, float* weights,
    int tokens, int first, float floor, float scale) {
    __shared__ Shared shared;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int first_expert = blockIdx.x * BLOCK_EXPERTS, first_token = blockIdx.y * 8;
    asm volatile("griddepcontrol.launch_dependents;");
    // Tokens i, i + CLUSTER and so on of the tile are those of block i.
    if (threadIdx.x == 0) expect_bytes(&shared.barrier, (7 - (int)blockIdx.x + CLUSTER) / CLUSTER * COUNT * 4);
    __syncthreads();
    arrive_at_cluster();
    uint4 rows[M_TILES][2][UNITS], inputs[UNITS];
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++)
        load_row(rows[i / 2][i % 2], weight + (size_t)min(first_expert + i * 8 + g, COUNT - 1) * HIDDEN);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    load_row(inputs, x + (size_t)min(first_token + g, tokens - 1) * HIDDEN);
    float sums[M_TILES][4] = {};
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
#pragma unroll
        for (int tile = 0; tile < M_TILES; tile++) {
            const uint4 upper = rows[tile][0][i], lower = rows[tile][1][i];
            mma(sums[tile], upper.x, lower.x, upper.y, lower.y, inputs[i].x, inputs[i].y);
            mma(sums[tile], upper.z, lower.z, upper.w, lower.w, inputs[i].z, inputs[i].w);
        }
    }
#pragma unroll
    for (int i = 0; i < M_TILES * 4; i++) shared.parts[warp][i / 4 * 16 + g + i % 4 / 2 * 8][t * 2 + i % 2] = sums[i / 4][i % 4];
    __syncthreads();
    wait_for_cluster();  // all of its blocks have begun
    if (threadIdx.x < BLOCK_EXPERTS * 8) {
        const int row = threadIdx.x / 8, token = threadIdx.x % 8, expert = first_expert + row;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += shared.parts[i][row][token];
        if (HAS_LOGIT_BIAS && expert < COUNT) sum += logit_bias[expert];
        if (expert < COUNT) store_remote(&shared.logits[token / CLUSTER][expert], &shared.barrier, token % CLUSTER, sum);
    }
    wait_for_bytes(&shared.barrier);
    const int token = first_token + warp * CLUSTER + blockIdx.x;
    if (warp * CLUSTER + blockIdx.x >= 8 || token >= tokens) return;
    const Rules rules = {first, floor, scale};
    choose(shared.logits[warp], correction, !HAS_LIVE || live[token], rules, chosen + token * PER_TOKEN, weights + token * PER_TOKEN);
}
