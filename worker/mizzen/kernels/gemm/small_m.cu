__device__ __forceinline__ uint4 weights_at(const uint4* at) {
    uint4 w;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(at) : "memory");
    return w;
}
__device__ __forceinline__ void fetch(uint4* to, const uint4* from, bool inside) {
    // Zeros where it is outside. Asynchronous: between ordinary loads the compiler would put products, and so
    // wait for each.
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void mma(
    float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float rounded(float x) {
    unsigned short r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return __uint_as_float((unsigned)r << 16);
}
__device__ __forceinline__ void store(unsigned short* at, float x) {
    unsigned short r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    *at = r;
}

#define VECTORS (COLUMNS / 8)
#define SEGMENTS (COLUMNS / 32)
#define BATCHES ((PARTS + 1) / 2)
#define AHEAD (PARTS == 1 && LOADS >= 8 ? 8 : PARTS <= 2 ? 4 : PARTS <= 4 ? 2 : 1)
#define ROUNDS ((SEGMENTS + 8 * LOADS - 1) / (8 * LOADS))
#define WIDTH (TILES * 8 / (1 + GATE))

// weight [rows * (1 + GATE), COLUMNS], x [count, COLUMNS] -> out [count, rows]: bfloat16, 16-byte aligned.
extern "C" __global__ void __launch_bounds__(256)
skinny(const uint4* weight, const uint4* x, unsigned short* out, int rows, int count) {
    // First the rows of x, then the warps' sums.
    constexpr int INPUTS = AHEAD * PARTS * 256 * 4, SUMS = 8 * BATCHES * TILES * 128;
    __shared__ __align__(16) float shared[INPUTS > SUMS ? INPUTS : SUMS];
    float* partial = shared;
    asm volatile("griddepcontrol.launch_dependents;");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
    const int first = blockIdx.x * WIDTH;
    const uint4* from[TILES];
    bool inside[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        // With a gate, the upper half of the tiles are the rows that it multiplies.
        const int half = GATE && tile >= TILES / 2;
        const int row = first + (tile - half * (TILES / 2)) * 8 + group;
        inside[tile] = row < rows;
        from[tile] = weight + (size_t)(row + half * rows) * VECTORS + quarter;
    }
    uint4 w[LOADS][TILES];
#pragma unroll
    for (int load = 0; load < LOADS; load++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int segment = warp * LOADS + load;
            w[load][tile] = make_uint4(0, 0, 0, 0);
            if (segment < SEGMENTS && inside[tile]) w[load][tile] = weights_at(from[tile] + segment * 4);
        }
    // Nothing that an earlier kernel writes is read before this, nor anything written.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    __align__(16) float sums[BATCHES][TILES][4] = {};
    uint4* mine = (uint4*)shared + threadIdx.x;  // a thread reads what it fetched itself
#pragma unroll (ROUNDS <= 4 ? ROUNDS : 1)
    for (int round = 0; round < ROUNDS; round++) {
#pragma unroll
        for (int load = 0; load < LOADS; load++) {
            const int segment = (round * 8 + warp) * LOADS + load;
            if (load % AHEAD == 0) {
#pragma unroll
                for (int i = 0; i < AHEAD && load + i < LOADS; i++)
#pragma unroll
                    for (int part = 0; part < PARTS; part++) {
                        const int row = part * 8 + group;
                        const bool inside = segment + i < SEGMENTS && row < count;
                        const size_t at = (size_t)row * VECTORS + (segment + i) * 4 + quarter;
                        fetch(&mine[(i * PARTS + part) * 256], x + (inside ? at : 0), inside);
                    }
                asm volatile("cp.async.wait_all;" ::: "memory");
            }
#pragma unroll
            for (int batch = 0; batch < BATCHES; batch++) {
                const uint4* pair = mine + (load % AHEAD * PARTS + 2 * batch) * 256;
                const uint4 a = pair[0];
                const uint4 b = PARTS > 1 ? pair[256] : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    mma(sums[batch][tile], a.x, b.x, a.y, b.y, w[load][tile].x, w[load][tile].y);
                    mma(sums[batch][tile], a.z, b.z, a.w, b.w, w[load][tile].z, w[load][tile].w);
                }
            }
            if (round + 1 < ROUNDS) {
                const int next = segment + 8 * LOADS;
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    w[load][tile] = make_uint4(0, 0, 0, 0);
                    if (next < SEGMENTS && inside[tile]) w[load][tile] = weights_at(from[tile] + next * 4);
                }
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            *(float4*)&partial[(((warp * BATCHES + batch) * TILES + tile) * 32 + lane) * 4] =
                *(float4*)sums[batch][tile];
    __syncthreads();
    for (int place = threadIdx.x; place < BATCHES * 16 * WIDTH; place += 256) {
        const int row = place / WIDTH, column = place % WIDTH;
        const int within = row % 16, tile = column / 8;
        const int spot = (within % 8 * 4 + column % 8 / 2) * 4 + within / 8 * 2 + column % 2;
        const int at = (row / 16 * TILES + tile) * 128 + spot;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += partial[i * BATCHES * TILES * 128 + at];
        if (GATE) {
            float up = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) up += partial[i * BATCHES * TILES * 128 + at + TILES / 2 * 128];
            const float gate = rounded(sum);
            sum = gate / (1 + __expf(-gate)) * rounded(up);
        }
        if (row < count && first + column < rows) store(out + (size_t)row * rows + first + column, sum);
    }
}
