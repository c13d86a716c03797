// How kernels reach memory that other GPUs read and write; put in front of reduce.cu and share.cu.

// Volatile, so that the compiler moves none across the wait; and never from a line of the L1 that is old.
__device__ __forceinline__ uint4 load(const uint4* at) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ void store(uint4* at, uint4 v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
        :: "l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void release(unsigned* at, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ unsigned acquire(const unsigned* at) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
