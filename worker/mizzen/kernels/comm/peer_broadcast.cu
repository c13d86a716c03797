// SPDX-License-Identifier: Apache-2.0
// Small exchanges over peer memory: broadcast of rank 0's last tokens, lookup of rows in a table sharded over ranks,
// and a barrier that makes the other ranks' writes to rank 0's memory visible to it.
//
// As in allreduce_rmsnorm.cu, 8 bytes of data travel in every 16 with the call number next to each 4 bytes, calls
// alternate between two halves of the memory, and calls are counted on the device. Data flows one way here: a half
// may be written again because an all-reduce of the layers, which waits for all ranks, lies between two calls.

__device__ __forceinline__ uint4 wait_for_data(const uint4* at, unsigned call) {
    uint4 v;
    do { v = load_peer(at); } while (v.y != call || v.w != call);
    return v;
}

// Broadcasts rank 0's values [count] of int64 to all ranks; peers [RANKS], calls [1], memory [2][MAX_ROWS] of uint4.
extern "C" __global__ void __launch_bounds__(256)
broadcast_tokens(const unsigned long long* peers, unsigned* calls, uint2* values, int count, int rank) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const unsigned call = *(volatile unsigned*)calls + 1;
    const size_t half = (size_t)(call & 1) * MAX_ROWS;
    for (int i = threadIdx.x; i < count; i += 256) {
        if (rank == 0) {
            const uint2 v = values[i];
            for (int peer = 1; peer < RANKS; peer++)
                store_peer((uint4*)peers[peer] + half + i, make_uint4(v.x, call, v.y, call));
        } else {
            const uint4 v = wait_for_data((const uint4*)peers[rank] + half + i, call);
            values[i] = make_uint2(v.x, v.z);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) *calls = call;
}

// Looks up one row per block: ids [rows] of int64, table [count][VECTORS] with this rank's rows, whose ids start at
// `first`, out [rows][VECTORS]; calls [MAX_ROWS], memory [2][MAX_ROWS][VECTORS][2] of uint4. Ids outside 0..total-1 give zeros.
extern "C" __global__ void __launch_bounds__(THREADS)
lookup_rows(const unsigned long long* peers, unsigned* calls, const long long* ids, const uint4* table, uint4* out,
       int first, int count, int total, int rank) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int row = blockIdx.x;
    const unsigned call = *(volatile unsigned*)(calls + row) + 1;
    const long long id = ids[row], local_row = id - first;
    const bool out_of_range = id < 0 || id >= total, is_local = local_row >= 0 && local_row < count;
    const size_t begin = ((size_t)(call & 1) * MAX_ROWS + row) * VECTORS;
    for (int i = threadIdx.x; i < VECTORS; i += THREADS) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (is_local) {
            v = table[(size_t)local_row * VECTORS + i];
            for (int peer = 0; peer < RANKS; peer++) {
                if (peer == rank) continue;
                uint4* line = (uint4*)peers[peer] + (begin + i) * 2;
                store_peer(line, make_uint4(v.x, call, v.y, call));
                store_peer(line + 1, make_uint4(v.z, call, v.w, call));
            }
        } else if (!out_of_range) {
            const uint4* line = (const uint4*)peers[rank] + (begin + i) * 2;
            const uint4 a = wait_for_data(line, call), b = wait_for_data(line + 1, call);
            v = make_uint4(a.x, a.z, b.x, b.z);
        }
        out[(size_t)row * VECTORS + i] = v;
    }
    __syncthreads();
    if (threadIdx.x == 0) calls[row] = call;
}

// Rank 0 waits until all other ranks have arrived; their earlier writes to its memory are visible then. calls [1],
// memory [RANKS] of unsigned: the last call of each rank. Previous kernels have completed and their stores are
// visible to this one, so the release covers them as well. The other ranks are not notified when rank 0 has read the
// data: they write again only after an all-reduce of the layers, which rank 0 enters after reading.
extern "C" __global__ void __launch_bounds__(32)
wait_for_writes(const unsigned long long* peers, unsigned* calls, int rank) {
    // Kernels that are launched early wait for the end of this one before they read anything.
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const unsigned call = *(volatile unsigned*)calls + 1;
    unsigned* flags = (unsigned*)peers[0];
    if (rank != 0) {
        if (threadIdx.x == 0) release_flag(flags + rank, call);
    } else if (threadIdx.x > 0 && threadIdx.x < RANKS) {
        while ((int)(acquire_flag(flags + threadIdx.x) - call) < 0) {}
    }
    __syncthreads();
    if (threadIdx.x == 0) *calls = call;
}
