// The sum over ranks of a layer's output, added to the residual stream and normalised: one block a row.
//
// Ranks reach one another's memory (`peers`: the address of the same buffer on each). Three ways:
//
//   PUSH      a block sends its row to every other rank, each 8 bytes of data in 16 with the number of the call
//             beside each 4: what arrives says by itself that it is there, so nobody fences and one way over the
//             links is all the delay. It moves twice the bytes.
//                 [2 calls][RANKS senders][ROOM rows][VECTORS][2] of uint4
//   READ      a block leaves its row in its own memory and tells the others by a flag; they read it.
//                 [2 calls][ROOM rows][VECTORS] of uint4, then flags [ROOM rows][RANKS] of unsigned
//   SHARED    each rank adds up every RANKS-th row alone: the others tell it that theirs lie in their memory, it
//             reads them, and sends everybody the sum, rounded. Two ways over the links, but of four ranks and
//             more the fewest bytes. Blocks begin in the order of rows on every rank, so that the first row that
//             is not done has its block everywhere, and no row waits for one whose block has no room.
//                 [2 calls][2: rows, sums][ROOM rows][VECTORS] of uint4, then flags [ROOM rows][RANKS], of which
//                 the rank's own stands for the sum's
//
// Calls alternate between two halves. A half is written again only in the call after next, and to begin that
// one a rank has got the rows of the call between from everybody, who thus have read all of the call before.
// Every row counts its own calls (`calls`), so that captured graphs need nothing from the host.

#define READ 0
#define PUSH 1
#define SHARED 2

__device__ __forceinline__ float low(unsigned x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high(unsigned x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ unsigned packed(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ uint4 fixed_at(const uint4* at) {
    uint4 w;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(at) : "memory");
    return w;
}
__device__ __forceinline__ float over_warp(float sum) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    return sum;
}
__device__ __forceinline__ void add(float (&sum)[8], uint4 v) {
    sum[0] += low(v.x), sum[1] += high(v.x), sum[2] += low(v.y), sum[3] += high(v.y);
    sum[4] += low(v.z), sum[5] += high(v.z), sum[6] += low(v.w), sum[7] += high(v.w);
}

#define PARTS ((VECTORS + THREADS - 1) / THREADS)

#if WAY == PUSH
__device__ __forceinline__ uint4* line_of(unsigned long long base, unsigned call, int sender, int row, int index) {
    return (uint4*)base + ((((size_t)(call & 1) * RANKS + sender) * ROOM + row) * VECTORS + index) * 2;
}
__device__ __forceinline__ void send(uint4* line, uint4 v, unsigned call) {
    store(line, make_uint4(v.x, call, v.y, call));
    store(line + 1, make_uint4(v.z, call, v.w, call));
}
__device__ __forceinline__ uint4 receive(const uint4* line, unsigned call) {
    uint4 a, b;
    do { a = load(line); } while (a.y != call || a.w != call);
    do { b = load(line + 1); } while (b.y != call || b.w != call);
    return make_uint4(a.x, a.z, b.x, b.z);
}
#else
// What there are of rows in a half: those of this rank, and with SHARED the sums behind them.
#define AREAS (1 + (WAY == SHARED))
__device__ __forceinline__ uint4* row_of(unsigned long long base, unsigned call, int row, int area = 0) {
    return (uint4*)base + (((size_t)(call & 1) * AREAS + area) * ROOM + row) * VECTORS;
}
__device__ __forceinline__ unsigned* flag_of(unsigned long long base, int row, int sender) {
    return (unsigned*)((uint4*)base + (size_t)2 * AREAS * ROOM * VECTORS) + row * RANKS + sender;
}
// The other may be at its next call already, but no further.
__device__ __forceinline__ void await(const unsigned* flag, unsigned call) {
    while ((int)(acquire(flag) - call) < 0) {}
}
#endif

// peers [RANKS], calls [ROOM], x, residual, out [rows, VECTORS * 8] and scale [VECTORS * 8] of bfloat16.
extern "C" __global__ void __launch_bounds__(THREADS)
reduce(const unsigned long long* peers, unsigned* calls, const uint4* x, uint4* residual, const uint4* scale,
       uint4* out, int rank, float epsilon) {
    __shared__ float squares[THREADS / 32];
    asm volatile("griddepcontrol.launch_dependents;");
    const int row = blockIdx.x;
    unsigned long long base[RANKS];
#pragma unroll
    for (int peer = 0; peer < RANKS; peer++) base[peer] = peers[peer];
    uint4 scales[PARTS], own[PARTS], stream[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const int index = threadIdx.x + i * THREADS;
        if (index < VECTORS) scales[i] = fixed_at(scale + index);
    }
    // Nothing that an earlier kernel writes is read before this, nor anything written.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const unsigned call = *(volatile unsigned*)(calls + row) + 1;
    x += (size_t)row * VECTORS, residual += (size_t)row * VECTORS, out += (size_t)row * VECTORS;
    unsigned long long mine = 0, theirs = 0;
#pragma unroll
    for (int peer = 0; peer < RANKS; peer++) {
        if (peer == rank) mine = base[peer];
        if (peer == threadIdx.x) theirs = base[peer];
    }
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const int index = threadIdx.x + i * THREADS;
        if (index >= VECTORS) continue;
        own[i] = fixed_at(x + index);
#if WAY == PUSH
#pragma unroll
        for (int peer = 0; peer < RANKS; peer++)
            if (peer != rank) send(line_of(base[peer], call, rank, row, index), own[i], call);
#else
        if (WAY == READ || row % RANKS != rank) store(row_of(mine, call, row) + index, own[i]);
#endif
    }
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const int index = threadIdx.x + i * THREADS;
        if (index < VECTORS) stream[i] = fixed_at(residual + index);
    }
#if WAY == READ
    __syncthreads();
    if (threadIdx.x < RANKS && threadIdx.x != rank) {
        release(flag_of(theirs, row, rank), call);
        await(flag_of(mine, row, threadIdx.x), call);
    }
    __syncthreads();
#elif WAY == SHARED
    const int owner = row % RANKS;
    if (owner != rank) {
        __syncthreads();
        if (threadIdx.x == owner) {
            release(flag_of(theirs, row, rank), call);
            await(flag_of(mine, row, rank), call);
        }
        __syncthreads();
    } else {
        if (threadIdx.x < RANKS && threadIdx.x != rank) await(flag_of(mine, row, threadIdx.x), call);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            const int index = threadIdx.x + i * THREADS;
            if (index >= VECTORS) continue;
            float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
            for (int peer = 0; peer < RANKS; peer++)
                add(sum, peer == rank ? own[i] : load(row_of(base[peer], call, row) + index));
            own[i] = make_uint4(packed(sum[0], sum[1]), packed(sum[2], sum[3]),
                                packed(sum[4], sum[5]), packed(sum[6], sum[7]));
#pragma unroll
            for (int peer = 0; peer < RANKS; peer++)
                if (peer != rank) store(row_of(base[peer], call, row, 1) + index, own[i]);
        }
        __syncthreads();
        if (threadIdx.x < RANKS && threadIdx.x != rank) release(flag_of(theirs, row, threadIdx.x), call);
    }
#endif
    float total = 0;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const int index = threadIdx.x + i * THREADS;
        if (index >= VECTORS) continue;
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#if WAY == SHARED
        add(sum, owner == rank ? own[i] : load(row_of(mine, call, row, 1) + index));
#else
        // In the order of ranks on every rank, so that all get the same bits.
#pragma unroll
        for (int peer = 0; peer < RANKS; peer++) {
            if (peer == rank) add(sum, own[i]);
#if WAY == PUSH
            else add(sum, receive(line_of(mine, call, peer, row, index), call));
#else
            else add(sum, load(row_of(base[peer], call, row) + index));
#endif
        }
#endif
        add(sum, stream[i]);
        stream[i] = make_uint4(packed(sum[0], sum[1]), packed(sum[2], sum[3]),
                               packed(sum[4], sum[5]), packed(sum[6], sum[7]));
        residual[index] = stream[i];
        float again[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        add(again, stream[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) total = fmaf(again[j], again[j], total);
    }
    total = over_warp(total);
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = total;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) total += squares[warp];
    const float by = rsqrtf(total / (VECTORS * 8) + epsilon);
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const int index = threadIdx.x + i * THREADS;
        if (index >= VECTORS) continue;
        const uint4 v = stream[i], s = scales[i];
        out[index] = make_uint4(packed(low(v.x) * by * low(s.x), high(v.x) * by * high(s.x)),
                                packed(low(v.y) * by * low(s.y), high(v.y) * by * high(s.y)),
                                packed(low(v.z) * by * low(s.z), high(v.z) * by * high(s.z)),
                                packed(low(v.w) * by * low(s.w), high(v.w) * by * high(s.w)));
    }
    if (threadIdx.x == 0) calls[row] = call;  // all threads have read it, before the barrier
}
