// SPDX-License-Identifier: Apache-2.0
// Hopper helpers of the wgmma kernels: mbarriers, TMA loads, shared-memory descriptors and output staging.
//
// The `wgmma` functions and bf16.cu are prepended to this text, and the kernel is appended. The kernel's compile
// options define SWIGLU.

typedef unsigned short u16;
typedef unsigned int u32;

struct __align__(64) TensorMap {
    u64 words[16];
};

// L2 cache policies of TMA loads.
#define EVICT_FIRST 0x12F0000000000000ull
#define EVICT_NORMAL 0x1000000000000000ull
#define EVICT_LAST 0x14F0000000000000ull

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ u32 map_to_rank(u32 at, u32 rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(at), "r"(rank));
    return remote;
}

__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" :: "r"(barrier), "r"(parity) : "memory");
}

// Cluster barrier with relaxed arrival: it does not order ordinary writes for the other blocks, which would cost a
// fence.
__device__ __forceinline__ void cluster_sync_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Loads 64 columns of weight rows by TMA, starting at `row`; the number of rows is that of the map's box.
__device__ __forceinline__ void tma_load_weights(const TensorMap* map, u32 target, u32 barrier, int column, int row, u64 cache_policy) {
#if SWIGLU
    // Eight gate rows alternate with their eight up rows, so that one thread accumulates both rows of a pair.
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %4, %5}], [%2], %6;"
        :: "r"(target), "l"(map), "r"(barrier), "r"(column), "r"(0), "r"(row >> 4), "l"(cache_policy) : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4}], [%2], %5;"
        :: "r"(target), "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(cache_policy) : "memory");
#endif
}

__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ u64 smem_descriptor(u32 at) {
    // 128-byte rows, eight per swizzled block of 1024 bytes; addresses are in units of 16 bytes.
    return (u64)((at & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ float round_to_bf16(float x) { return __uint_as_float(pack_bf16x2(x, 0) << 16); }

__device__ __forceinline__ float swiglu(float gate, float up) {
    gate = round_to_bf16(gate);
    return __fdividef(gate, 1 + __expf(-gate)) * round_to_bf16(up);
}

// Writes the outputs of 16 weight rows for eight batch rows to the staging tile [.., pitch], transposed.
__device__ __forceinline__ void stage_outputs(u32 tile, int pitch, int group, int warp, int lane, const float* d) {
    const u32 row = tile + (group * 8 + lane % 8) * pitch * 2;
#if SWIGLU
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};"
        :: "r"(row + warp * 16), "r"(pack_bf16x2(swiglu(d[0], d[2]), swiglu(d[1], d[3]))) : "memory");
#else
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
        :: "r"(row + warp * 32 + (lane / 8 % 2) * 16), "r"(pack_bf16x2(d[0], d[1])), "r"(pack_bf16x2(d[2], d[3])) : "memory");
#endif
}

// Loads this block's share of `rows` rows of x into the `sharing` blocks that share them, in the 128-byte swizzle.
template <int rows, int sharing>
__device__ __forceinline__ void tma_load_shared_inputs(const TensorMap* map, u32 target, u32 barrier, int column, int rank, int k_split) {
    const int row = rank * (rows / sharing);
    target += row * 128;
    if constexpr (sharing > 1) {
        const u16 mask = ((1 << sharing) - 1) << (k_split * sharing);
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
            "[%0], [%1, {%3, %4}], [%2], %5, %6;"
            :: "r"(target), "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(mask), "l"(EVICT_LAST) : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%3, %4}], [%2], %5;"
            :: "r"(target), "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(EVICT_LAST) : "memory");
    }
}

// Adds up the sums of all k-splits at one position, in the order of the splits, and stages the result. The blocks of a
// k-split have adjacent ranks in the cluster, `sharing` of them; `rank` is this block's among them.
template <int splits, int sharing>
__device__ __forceinline__ void reduce_splits(const float4* own_sums, u32 tile, int pitch, int group, int warp, int rank) {
    float4 v[splits];
    float d[4] = {};
#pragma unroll
    for (int from = 0; from < splits; from++) {
        const u32 address = map_to_rank(shared_address(own_sums), from * sharing + rank);
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
            : "=f"(v[from].x), "=f"(v[from].y), "=f"(v[from].z), "=f"(v[from].w) : "r"(address) : "memory");
    }
#pragma unroll
    for (int from = 0; from < splits; from++)
        d[0] += v[from].x, d[1] += v[from].y, d[2] += v[from].z, d[3] += v[from].w;
    stage_outputs(tile, pitch, group, warp, threadIdx.x % 32, d);
}
