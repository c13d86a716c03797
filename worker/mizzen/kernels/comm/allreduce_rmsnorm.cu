// SPDX-License-Identifier: Apache-2.0
// All-reduce of a layer's output fused with the residual addition and RMSNorm: one block per row.
//
// Ranks access one another's memory (`peers`: address of the same buffer on each rank) by one of three methods:
//
//   PUSH      A block sends its row to every other rank, 8 bytes of data in every 16, with the call number next to
//             each 4 bytes. Data that carries its own arrival mark needs no fence, so the latency is one trip over
//             NVLink; it moves twice the bytes.
//                 [2 calls][RANKS senders][MAX_ROWS rows][VECTORS][2] of uint4
//   READ      A block writes its row to its own memory and notifies the other ranks by a flag; they read it.
//                 [2 calls][MAX_ROWS rows][VECTORS] of uint4, then flags [MAX_ROWS rows][RANKS] of unsigned
//   TWO_SHOT  Every rank reduces every RANKS-th row: the others signal that their rows are in their memory, the
//             owner reads them and sends the rounded sum to all ranks. Two trips over NVLink, but the fewest bytes
//             from four ranks on. Blocks start in row order on every rank, so the first unfinished row has a running
//             block on every rank, and no row waits for a block that does not fit on the GPU.
//                 [2 calls][2: rows, sums][MAX_ROWS rows][VECTORS] of uint4, then flags [MAX_ROWS rows][RANKS]; the rank's
//                 own flag says that the sum has arrived
//
// Calls alternate between two halves of the memory. A half is written again two calls later. By then the rank has
// received the rows of the call in between from every rank, so every rank has finished reading the earlier call.
// Every row counts its own calls (`calls`), so captured graphs need nothing from the host.

#define READ 0
#define PUSH 1
#define TWO_SHOT 2

__device__ __forceinline__ uint4 load_volatile(const uint4* at) {
    uint4 w;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(at) : "memory");
    return w;
}
__device__ __forceinline__ float warp_sum(float sum) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    return sum;
}
__device__ __forceinline__ void add_bf16x8(float (&sum)[8], uint4 v) {
    sum[0] += bf16_low(v.x), sum[1] += bf16_high(v.x), sum[2] += bf16_low(v.y), sum[3] += bf16_high(v.y);
    sum[4] += bf16_low(v.z), sum[5] += bf16_high(v.z), sum[6] += bf16_low(v.w), sum[7] += bf16_high(v.w);
}

#define VECTORS_PER_THREAD ((VECTORS + THREADS - 1) / THREADS)

#if METHOD == PUSH
__device__ __forceinline__ uint4* push_line(unsigned long long base, unsigned call, int sender, int row, int index) {
    return (uint4*)base + ((((size_t)(call & 1) * RANKS + sender) * MAX_ROWS + row) * VECTORS + index) * 2;
}
__device__ __forceinline__ void send(uint4* line, uint4 v, unsigned call) {
    store_peer(line, make_uint4(v.x, call, v.y, call));
    store_peer(line + 1, make_uint4(v.z, call, v.w, call));
}
__device__ __forceinline__ uint4 receive(const uint4* line, unsigned call) {
    uint4 a, b;
    do { a = load_peer(line); } while (a.y != call || a.w != call);
    do { b = load_peer(line + 1); } while (b.y != call || b.w != call);
    return make_uint4(a.x, a.z, b.x, b.z);
}
#else
// Row areas in a half: the rows of this rank and, with TWO_SHOT, the sums after them.
#define AREAS (1 + (METHOD == TWO_SHOT))
__device__ __forceinline__ uint4* peer_row(unsigned long long base, unsigned call, int row, int area = 0) {
    return (uint4*)base + (((size_t)(call & 1) * AREAS + area) * MAX_ROWS + row) * VECTORS;
}
__device__ __forceinline__ unsigned* peer_flag(unsigned long long base, int row, int sender) {
    return (unsigned*)((uint4*)base + (size_t)2 * AREAS * MAX_ROWS * VECTORS) + row * RANKS + sender;
}
// The other rank may already be at its next call, but not further.
__device__ __forceinline__ void wait_for_flag(const unsigned* flag, unsigned call) {
    while ((int)(acquire_flag(flag) - call) < 0) {}
}
#endif

// peers [RANKS], calls [MAX_ROWS], x, residual, out [rows, VECTORS * 8] and scale [VECTORS * 8] of bfloat16.
extern "C" __global__ void __launch_bounds__(THREADS)
allreduce_rmsnorm(const unsigned long long* peers, unsigned* calls, const uint4* x, uint4* residual, const uint4* scale,
       uint4* out, int rank, float epsilon) {
    __shared__ float squares[THREADS / 32];
    asm volatile("griddepcontrol.launch_dependents;");
    const int row = blockIdx.x;
    unsigned long long base[RANKS];
#pragma unroll
    for (int peer = 0; peer < RANKS; peer++) base[peer] = peers[peer];
    uint4 scales[VECTORS_PER_THREAD], own[VECTORS_PER_THREAD], stream[VECTORS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < VECTORS_PER_THREAD; i++) {
        const int index = threadIdx.x + i * THREADS;
        if (index < VECTORS) scales[i] = load_volatile(scale + index);
    }
    // PDL wait: outputs of earlier kernels are neither read nor overwritten before this point.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const unsigned call = *(volatile unsigned*)(calls + row) + 1;
    x += (size_t)row * VECTORS, residual += (size_t)row * VECTORS, out += (size_t)row * VECTORS;
    unsigned long long own_base = 0, peer_base = 0;
#pragma unroll
    for (int peer = 0; peer < RANKS; peer++) {
        if (peer == rank) own_base = base[peer];
        if (peer == threadIdx.x) peer_base = base[peer];
    }
#pragma unroll
    for (int i = 0; i < VECTORS_PER_THREAD; i++) {
        const int index = threadIdx.x + i * THREADS;
        if (index >= VECTORS) continue;
        own[i] = load_volatile(x + index);
#if METHOD == PUSH
#pragma unroll
        for (int peer = 0; peer < RANKS; peer++)
            if (peer != rank) send(push_line(base[peer], call, rank, row, index), own[i], call);
#else
        if (METHOD == READ || row % RANKS != rank) store_peer(peer_row(own_base, call, row) + index, own[i]);
#endif
    }
#pragma unroll
    for (int i = 0; i < VECTORS_PER_THREAD; i++) {
        const int index = threadIdx.x + i * THREADS;
        if (index < VECTORS) stream[i] = load_volatile(residual + index);
    }
#if METHOD == READ
    __syncthreads();
    if (threadIdx.x < RANKS && threadIdx.x != rank) {
        release_flag(peer_flag(peer_base, row, rank), call);
        wait_for_flag(peer_flag(own_base, row, threadIdx.x), call);
    }
    __syncthreads();
#elif METHOD == TWO_SHOT
    const int owner = row % RANKS;
    if (owner != rank) {
        __syncthreads();
        if (threadIdx.x == owner) {
            release_flag(peer_flag(peer_base, row, rank), call);
            wait_for_flag(peer_flag(own_base, row, rank), call);
        }
        __syncthreads();
    } else {
        if (threadIdx.x < RANKS && threadIdx.x != rank) wait_for_flag(peer_flag(own_base, row, threadIdx.x), call);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < VECTORS_PER_THREAD; i++) {
            const int index = threadIdx.x + i * THREADS;
            if (index >= VECTORS) continue;
            float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
            for (int peer = 0; peer < RANKS; peer++)
                add_bf16x8(sum, peer == rank ? own[i] : load_peer(peer_row(base[peer], call, row) + index));
            own[i] = make_uint4(pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]),
                                pack_bf16x2(sum[4], sum[5]), pack_bf16x2(sum[6], sum[7]));
#pragma unroll
            for (int peer = 0; peer < RANKS; peer++)
                if (peer != rank) store_peer(peer_row(base[peer], call, row, 1) + index, own[i]);
        }
        __syncthreads();
        if (threadIdx.x < RANKS && threadIdx.x != rank) release_flag(peer_flag(peer_base, row, threadIdx.x), call);
    }
#endif
    float total = 0;
#pragma unroll
    for (int i = 0; i < VECTORS_PER_THREAD; i++) {
        const int index = threadIdx.x + i * THREADS;
        if (index >= VECTORS) continue;
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#if METHOD == TWO_SHOT
        add_bf16x8(sum, owner == rank ? own[i] : load_peer(peer_row(own_base, call, row, 1) + index));
#else
        // Add in rank order on every rank, so that all ranks get the same bits.
#pragma unroll
        for (int peer = 0; peer < RANKS; peer++) {
            if (peer == rank) add_bf16x8(sum, own[i]);
#if METHOD == PUSH
            else add_bf16x8(sum, receive(push_line(own_base, call, peer, row, index), call));
#else
            else add_bf16x8(sum, load_peer(peer_row(base[peer], call, row) + index));
#endif
        }
#endif
        add_bf16x8(sum, stream[i]);
        stream[i] = make_uint4(pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]),
                               pack_bf16x2(sum[4], sum[5]), pack_bf16x2(sum[6], sum[7]));
        residual[index] = stream[i];
        float rounded[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        add_bf16x8(rounded, stream[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) total = fmaf(rounded[j], rounded[j], total);
    }
    total = warp_sum(total);
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = total;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) total += squares[warp];
    const float inverse_rms = rsqrtf(total / (VECTORS * 8) + epsilon);
#pragma unroll
    for (int i = 0; i < VECTORS_PER_THREAD; i++) {
        const int index = threadIdx.x + i * THREADS;
        if (index >= VECTORS) continue;
        const uint4 v = stream[i], s = scales[i];
        out[index] = make_uint4(pack_bf16x2(bf16_low(v.x) * inverse_rms * bf16_low(s.x), bf16_high(v.x) * inverse_rms * bf16_high(s.x)),
                                pack_bf16x2(bf16_low(v.y) * inverse_rms * bf16_low(s.y), bf16_high(v.y) * inverse_rms * bf16_high(s.y)),
                                pack_bf16x2(bf16_low(v.z) * inverse_rms * bf16_low(s.z), bf16_high(v.z) * inverse_rms * bf16_high(s.z)),
                                pack_bf16x2(bf16_low(v.w) * inverse_rms * bf16_low(s.w), bf16_high(v.w) * inverse_rms * bf16_high(s.w)));
    }
    if (threadIdx.x == 0) calls[row] = call;  // all threads read it before the barrier
}
