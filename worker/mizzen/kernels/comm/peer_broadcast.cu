// What one rank knows and others need, by peer memory: rank 0's last tokens, rows of a table split over ranks, and
// that what the others wrote to rank 0's memory is there.
//
// As in reduce.cu, 8 bytes of data travel in 16 with the number of the call beside each 4, calls alternate between
// two halves of the memory, and they are counted where they are used. Data goes one way here: a half may be
// written again because an all-reduce of the layers, which waits for everybody, lies between two calls.

__device__ __forceinline__ uint4 arrived(const uint4* at, unsigned call) {
    uint4 v;
    do { v = load(at); } while (v.y != call || v.w != call);
    return v;
}

// tokens [count] of int64: rank 0's to all; peers [RANKS], calls [1], memory [2][ROOM] of uint4.
extern "C" __global__ void __launch_bounds__(256)
tokens(const unsigned long long* peers, unsigned* calls, uint2* values, int count, int rank) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const unsigned call = *(volatile unsigned*)calls + 1;
    const size_t half = (size_t)(call & 1) * ROOM;
    for (int i = threadIdx.x; i < count; i += 256) {
        if (rank == 0) {
            const uint2 v = values[i];
            for (int peer = 1; peer < RANKS; peer++)
                store((uint4*)peers[peer] + half + i, make_uint4(v.x, call, v.y, call));
        } else {
            const uint4 v = arrived((const uint4*)peers[rank] + half + i, call);
            values[i] = make_uint2(v.x, v.z);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) *calls = call;
}

// One block a row: ids [rows] of int64, table [count][VECTORS] of what this rank holds, the ids from `first` on,
// out [rows][VECTORS]; calls [ROOM], memory [2][ROOM][VECTORS][2] of uint4. Ids beyond `total` give zeros.
extern "C" __global__ void __launch_bounds__(THREADS)
lookup(const unsigned long long* peers, unsigned* calls, const long long* ids, const uint4* table, uint4* out,
       int first, int count, int total, int rank) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int row = blockIdx.x;
    const unsigned call = *(volatile unsigned*)(calls + row) + 1;
    const long long id = ids[row], place = id - first;
    const bool nobodys = id < 0 || id >= total, held = place >= 0 && place < count;
    const size_t begin = ((size_t)(call & 1) * ROOM + row) * VECTORS;
    for (int i = threadIdx.x; i < VECTORS; i += THREADS) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (held) {
            v = table[(size_t)place * VECTORS + i];
            for (int peer = 0; peer < RANKS; peer++) {
                if (peer == rank) continue;
                uint4* line = (uint4*)peers[peer] + (begin + i) * 2;
                store(line, make_uint4(v.x, call, v.y, call));
                store(line + 1, make_uint4(v.z, call, v.w, call));
            }
        } else if (!nobodys) {
            const uint4* line = (const uint4*)peers[rank] + (begin + i) * 2;
            const uint4 a = arrived(line, call), b = arrived(line + 1, call);
            v = make_uint4(a.x, a.z, b.x, b.z);
        }
        out[(size_t)row * VECTORS + i] = v;
    }
    __syncthreads();
    if (threadIdx.x == 0) calls[row] = call;
}

// Rank 0 waits until all others are here: what they wrote to its memory ahead of this is then there. calls [1],
// memory [RANKS] of unsigned, the last call of each. The kernels ahead have ended and their stores are seen by
// whoever waits for them, so that the release covers those, too. Nothing tells the others that rank 0 has read:
// they write again behind an all-reduce of the layers, which rank 0 enters once it has.
extern "C" __global__ void __launch_bounds__(32)
meet(const unsigned long long* peers, unsigned* calls, int rank) {
    // Kernels that begin now wait for the end of this one before they read anything.
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const unsigned call = *(volatile unsigned*)calls + 1;
    unsigned* flags = (unsigned*)peers[0];
    if (rank != 0) {
        if (threadIdx.x == 0) release(flags + rank, call);
    } else if (threadIdx.x > 0 && threadIdx.x < RANKS) {
        while ((int)(acquire(flags + threadIdx.x) - call) < 0) {}
    }
    __syncthreads();
    if (threadIdx.x == 0) *calls = call;
}
