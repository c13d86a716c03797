// What kernels share that multiply on tensor cores by groups of warps: barriers, copies, and outputs.
//
// `wgmma` is put in front of this text, and the kernel's own text behind it. GATE is defined by who compiles.

typedef unsigned short u16;
typedef unsigned int u32;

struct __align__(64) TensorMap {
    u64 words[16];
};

// How long the second-level cache keeps what is fetched.
#define FIRST_USE 0x12F0000000000000ull
#define USUAL 0x1000000000000000ull
#define KEEP 0x14F0000000000000ull

__device__ __forceinline__ u32 address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ u32 at_rank(u32 at, u32 rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(at), "r"(rank));
    return remote;
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" :: "r"(barrier), "r"(parity) : "memory");
}

// All blocks of the cluster meet. Relaxed, it orders no ordinary writes for the others: that would cost a fence.
__device__ __forceinline__ void cluster_meet() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Fetches 64 columns of weight rows, as many as the map's box has, from `row` on.
__device__ __forceinline__ void fetch_weights(const TensorMap* map, u32 to, u32 barrier, int column, int row, u64 use) {
#if GATE
    // Eight gates, the eight rows that they multiply, and so on: a thread's accumulators hold both of a pair.
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %4, %5}], [%2], %6;"
        :: "r"(to), "l"(map), "r"(barrier), "r"(column), "r"(0), "r"(row >> 4), "l"(use) : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4}], [%2], %5;"
        :: "r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(use) : "memory");
#endif
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ u64 descriptor(u32 at) {
    // Rows of 128 bytes, eight to a swizzled block of 1024; addresses in units of 16 bytes.
    return (u64)((at & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float rounded(float x) { return __uint_as_float(pack(x, 0) << 16); }

__device__ __forceinline__ float silu_times(float gate, float other) {
    gate = rounded(gate);
    return __fdividef(gate, 1 + __expf(-gate)) * rounded(other);
}

// Writes eight batch rows of the outputs of 16 weight rows to the staging tile [.., pitch], transposed.
__device__ __forceinline__ void stage(u32 tile, int pitch, int group, int warp, int lane, const float* d) {
    const u32 row = tile + (group * 8 + lane % 8) * pitch * 2;
#if GATE
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};"
        :: "r"(row + warp * 16), "r"(pack(silu_times(d[0], d[2]), silu_times(d[1], d[3]))) : "memory");
#else
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
        :: "r"(row + warp * 32 + (lane / 8 % 2) * 16), "r"(pack(d[0], d[1])), "r"(pack(d[2], d[3])) : "memory");
#endif
}
