// SPDX-License-Identifier: Apache-2.0
// Parts of coded_mma.cu and few_mma.cu, to which this text is prepended: copies to shared memory, and what kernels load.

// Starts to copy 16 bytes to shared memory; zeros if they are not wanted.
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` groups of this thread's copies are on their way.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

// Returns an expert that the router chose, past the L1 cache, in which another kernel may have left older values.
__device__ __forceinline__ long long load_choice(const long long* from) {
    long long expert;
    asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(expert) : "l"(from) : "memory");
    return expert;
}

__device__ __forceinline__ unsigned word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

__device__ __forceinline__ float load_bias(const u16* bias, int row) { return HAS_BIAS ? __uint_as_float(bias[row] << 16) : 0; }
