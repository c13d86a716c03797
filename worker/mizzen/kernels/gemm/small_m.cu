// SPDX-License-Identifier: Apache-2.0
__device__ __forceinline__ uint4 load_weights(const uint4* at) {
    uint4 w;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(at) : "memory");
    return w;
}
__device__ __forceinline__ void copy_async(uint4* target, const uint4* src, bool inside) {
    // Zero-fills if not `inside`. Asynchronous, because the compiler would interleave MMAs with ordinary loads
    // and so wait for each load.
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"((unsigned)__cvta_generic_to_shared(target)), "l"(src), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void mma(
    float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float round_to_bf16(float x) {
    unsigned short r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return __uint_as_float((unsigned)r << 16);
}
__device__ __forceinline__ void store_bf16(unsigned short* at, float x) {
    unsigned short r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    *at = r;
}

#define VECTORS (COLUMNS / 8)
#define SEGMENTS (COLUMNS / 32)
#define M_TILES ((ROW_GROUPS + 1) / 2)
#define PREFETCH_LOADS (ROW_GROUPS == 1 && LOADS >= 8 ? 8 : ROW_GROUPS <= 2 ? 4 : ROW_GROUPS <= 4 ? 2 : 1)
#define ROUNDS ((SEGMENTS + 8 * LOADS - 1) / (8 * LOADS))
#define BLOCK_OUTPUTS (TILES * 8 / (1 + SWIGLU))

// Small-M GEMM: weight [rows * (1 + SWIGLU), COLUMNS], x [count, COLUMNS] -> out [count, rows], bfloat16, 16-byte
// aligned. SWIGLU computes silu(gate) * up, where the weight holds the gate rows and then the up rows. BIAS, without
// SWIGLU, adds bias [rows] before the outputs are rounded.
extern "C" __global__ void __launch_bounds__(256)
small_m(const uint4* weight, const uint4* x, unsigned short* out, int rows, int count
#if BIAS
    , const unsigned short* bias
#endif
) {
    // Holds the rows of x during the main loop, then the partial sums of the warps.
    constexpr int INPUT_WORDS = PREFETCH_LOADS * ROW_GROUPS * 256 * 4, SUM_WORDS = 8 * M_TILES * TILES * 128;
    __shared__ __align__(16) float shared[INPUT_WORDS > SUM_WORDS ? INPUT_WORDS : SUM_WORDS];
    float* partial = shared;
    asm volatile("griddepcontrol.launch_dependents;");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, lane_group = lane / 4, lane_quarter = lane % 4;
    const int first = blockIdx.x * BLOCK_OUTPUTS;
    const uint4* weight_rows[TILES];
    bool inside[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        // With SwiGLU, the second half of the tiles holds the up rows.
        const int half = SWIGLU && tile >= TILES / 2;
        const int row = first + (tile - half * (TILES / 2)) * 8 + lane_group;
        inside[tile] = row < rows;
        weight_rows[tile] = weight + (size_t)(row + half * rows) * VECTORS + lane_quarter;
    }
    uint4 w[LOADS][TILES];
#pragma unroll
    for (int load = 0; load < LOADS; load++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int segment = warp * LOADS + load;
            w[load][tile] = make_uint4(0, 0, 0, 0);
            if (segment < SEGMENTS && inside[tile]) w[load][tile] = load_weights(weight_rows[tile] + segment * 4);
        }
#if BIAS
    static_assert(256 % BLOCK_OUTPUTS == 0, "all outputs of a thread have the same bias");
    const int own_output = first + threadIdx.x % BLOCK_OUTPUTS;
    const float own_bias = own_output < rows ? __uint_as_float((unsigned)bias[own_output] << 16) : 0;
#endif
    // PDL wait: outputs of earlier kernels are neither read nor overwritten before this point.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    __align__(16) float sums[M_TILES][TILES][4] = {};
    uint4* own_inputs = (uint4*)shared + threadIdx.x;  // every thread reads only the inputs that it copied itself
#pragma unroll (ROUNDS <= 4 ? ROUNDS : 1)
    for (int round = 0; round < ROUNDS; round++) {
#pragma unroll
        for (int load = 0; load < LOADS; load++) {
            const int segment = (round * 8 + warp) * LOADS + load;
            if (load % PREFETCH_LOADS == 0) {
#pragma unroll
                for (int i = 0; i < PREFETCH_LOADS && load + i < LOADS; i++)
#pragma unroll
                    for (int row_group = 0; row_group < ROW_GROUPS; row_group++) {
                        const int row = row_group * 8 + lane_group;
                        const bool inside = segment + i < SEGMENTS && row < count;
                        const size_t at = (size_t)row * VECTORS + (segment + i) * 4 + lane_quarter;
                        copy_async(&own_inputs[(i * ROW_GROUPS + row_group) * 256], x + (inside ? at : 0), inside);
                    }
                asm volatile("cp.async.wait_all;" ::: "memory");
            }
#pragma unroll
            for (int m_tile = 0; m_tile < M_TILES; m_tile++) {
                const uint4* pair = own_inputs + (load % PREFETCH_LOADS * ROW_GROUPS + 2 * m_tile) * 256;
                const uint4 a = pair[0];
                const uint4 b = ROW_GROUPS > 1 ? pair[256] : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    mma(sums[m_tile][tile], a.x, b.x, a.y, b.y, w[load][tile].x, w[load][tile].y);
                    mma(sums[m_tile][tile], a.z, b.z, a.w, b.w, w[load][tile].z, w[load][tile].w);
                }
            }
            if (round + 1 < ROUNDS) {
                const int next = segment + 8 * LOADS;
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    w[load][tile] = make_uint4(0, 0, 0, 0);
                    if (next < SEGMENTS && inside[tile]) w[load][tile] = load_weights(weight_rows[tile] + next * 4);
                }
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int m_tile = 0; m_tile < M_TILES; m_tile++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            *(float4*)&partial[(((warp * M_TILES + m_tile) * TILES + tile) * 32 + lane) * 4] =
                *(float4*)sums[m_tile][tile];
    __syncthreads();
    for (int output = threadIdx.x; output < M_TILES * 16 * BLOCK_OUTPUTS; output += 256) {
        const int row = output / BLOCK_OUTPUTS, column = output % BLOCK_OUTPUTS;
        const int within = row % 16, tile = column / 8;
        const int offset = (within % 8 * 4 + column % 8 / 2) * 4 + within / 8 * 2 + column % 2;
        const int at = (row / 16 * TILES + tile) * 128 + offset;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += partial[i * M_TILES * TILES * 128 + at];
        if (SWIGLU) {
            float up = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) up += partial[i * M_TILES * TILES * 128 + at + TILES / 2 * 128];
            const float gate = round_to_bf16(sum);
            sum = gate / (1 + __expf(-gate)) * round_to_bf16(up);
        }
#if BIAS
        sum += own_bias;
#endif
        if (row < count && first + column < rows) store_bf16(out + (size_t)row * rows + first + column, sum);
    }
}
