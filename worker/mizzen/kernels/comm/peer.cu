// SPDX-License-Identifier: Apache-2.0
// Access to memory that other GPUs read and write; prepended to allreduce_rmsnorm.cu and peer_broadcast.cu.

// Volatile, so that the compiler moves no load past the PDL wait and no stale L1 line is read.
__device__ __forceinline__ uint4 load_peer(const uint4* at) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ void store_peer(uint4* at, uint4 v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
        :: "l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void release_flag(unsigned* at, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ unsigned acquire_flag(const unsigned* at) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
